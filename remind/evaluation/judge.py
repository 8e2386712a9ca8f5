"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from remind.evaluation.parse import ParsedAnswer
from remind.text.words import Verdict

if TYPE_CHECKING:
    from remind.models.generate import Generation
    from remind.perception.auxiliary import AuxiliaryLLM
    from remind.states.records import StateRecord


class Case(NamedTuple):
    """What the judge sees."""

    question: str
    references: tuple[str, ...]
    prediction: str


def judge_answers(judge: AuxiliaryLLM, cases: Sequence[Case], samples: Sequence[str] | None = None) -> list[Verdict]:
    """What the judge says of each case.

    An empty prediction is rejected without asking (rule 5 of Figure 10).

    Args:
        samples: question ids to which a judge's costs are booked, one for each case.

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    asked = [n for n, case in enumerate(cases) if case.prediction.strip()]
    names = None if samples is None else [samples[n] for n in asked]
    found = dict(zip(asked, judge.verdicts([cases[n] for n in asked], names) if asked else (), strict=True))
    return [found.get(n, Verdict(False)) for n in range(len(cases))]


def judge_run(
    judge: AuxiliaryLLM, records: Sequence[StateRecord], outputs: Sequence[Generation], parsed: Sequence[ParsedAnswer]
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
