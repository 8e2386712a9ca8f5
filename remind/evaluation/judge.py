"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from remind.core.progress import ProgressBar
from remind.evaluation.parse import ParsedAnswer
from remind.states.auxiliary import Verdict

if TYPE_CHECKING:
    from remind.models.generate import Generation
    from remind.states.auxiliary import AuxiliaryLLM
    from remind.states.records import StateRecord

#: Cases put to a judge at once.
_AT_ONCE = 64


class Case(NamedTuple):
    """What the judge sees."""

    question: str
    references: tuple[str, ...]
    prediction: str


def judge_answers(judge: AuxiliaryLLM, cases: Sequence[Case], samples: Sequence[str] | None = None) -> list[Verdict]:
    """What the judge says of each case.

    An empty prediction is rejected without asking (rule 5 of Figure 10). Equal cases are asked once.

    Args:
        samples: question ids to which a judge's costs are booked, one for each case.

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    names = dict(zip(reversed(cases), reversed(samples or [""] * len(cases)), strict=True))
    asked = [case for case in dict.fromkeys(cases) if case.prediction.strip()]
    found = dict.fromkeys(cases, Verdict(False))
    if asked:
        with ProgressBar("judge", len(asked)) as bar:
            for start in range(0, len(asked), _AT_ONCE):
                group = asked[start : start + _AT_ONCE]
                found |= zip(group, judge.verdicts(group, [names[case] for case in group]), strict=True)
                bar.step(len(group))
    return [found[case] for case in cases]


def judge_run(
    judge: AuxiliaryLLM,
    records: Sequence[StateRecord],
    outputs: Sequence[Generation],
    parsed: Sequence[ParsedAnswer],
) -> list[Verdict | None]:
    """One verdict per question; None: there was nothing to judge (options, no gold answer, no output).

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    cases = {
        n: Case(record.question, record.answers, said.answer)
        for n, (record, output, said) in enumerate(zip(records, outputs, parsed, strict=True))
        if record.format == "direct" and record.answers and output.failure is None
    }
    verdicts = judge_answers(judge, list(cases.values()), [records[n].question_id for n in cases])
    by_place = dict(zip(cases, verdicts, strict=True))
    return [by_place.get(n) for n in range(len(records))]
