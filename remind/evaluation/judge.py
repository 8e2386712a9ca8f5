"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from remind.core.errors import ConfigError
from remind.core.progress import ProgressBar
from remind.evaluation.parse import ParsedAnswer

if TYPE_CHECKING:
    from remind.llm.auxiliary import AuxiliaryLLM
    from remind.models.generate import Generation
    from remind.states.records import StateRecord

#: Cases put to a judge at once.
_AT_ONCE = 64


class Case(NamedTuple):
    """What the judge sees."""

    question: str
    references: tuple[str, ...]
    prediction: str


class Ruling(NamedTuple):
    """What became of a case.

    Attributes:
        value: whether the answer is accepted; None: the judge itself failed, which is no verdict on the answer.
        why: the kind of that failure, such as "neither" for a reply that is neither verdict; "" otherwise.
        message: the same in a line.
    """

    value: bool | None
    why: str = ""
    message: str = ""


def load_judge(name: str) -> AuxiliaryLLM:
    """The judge of that name. "offline" is a rule, not a model: its verdicts compare with one another only.

    Raises:
        ConfigError: no such judge.
    """
    if name != "offline":
        raise ConfigError(f"no judge {name!r}; there is: offline (any other AuxiliaryLLM can be passed to evaluate())")
    from remind.llm.auxiliary import OfflineLLM

    return OfflineLLM()


def judge_answers(judge: AuxiliaryLLM, cases: Sequence[Case], samples: Sequence[str] | None = None) -> list[Ruling]:
    """What the judge says of each case.

    An empty prediction is rejected without asking (rule 5 of Figure 10). Equal cases are asked once.

    Args:
        samples: question ids to which a judge's costs are booked, one for each case.

    Raises:
        ModelError: a judge that cannot be used at all.
    """
    names = dict(zip(reversed(cases), reversed(samples or [""] * len(cases)), strict=True))
    asked = [case for case in dict.fromkeys(cases) if case.prediction.strip()]
    rulings = dict.fromkeys(cases, Ruling(False))
    if asked:
        with ProgressBar("judge", len(asked)) as bar:
            for start in range(0, len(asked), _AT_ONCE):
                group = asked[start : start + _AT_ONCE]
                verdicts = judge.verdicts(group, [names[case] for case in group])
                for case, verdict in zip(group, verdicts, strict=True):
                    rulings[case] = Ruling(verdict.value, verdict.failure or "", verdict.message)
                bar.step(len(group))
    return [rulings[case] for case in cases]


def case_of(record: StateRecord, output: Generation, parsed: ParsedAnswer) -> Case | None:
    """What a judge has to decide; None where there is nothing to: options, no gold answer, no output."""
    if record.format != "direct" or not record.answers or output.failure is not None:
        return None
    return Case(record.question, record.answers, parsed.answer)


def judge_run(
    judge: AuxiliaryLLM,
    records: Sequence[StateRecord],
    outputs: Sequence[Generation],
    parsed: Sequence[ParsedAnswer],
) -> list[Ruling | None]:
    """One ruling per question; None: there was nothing to judge. Raises ModelError for a judge that cannot be used."""
    cases = list(map(case_of, records, outputs, parsed))
    direct = {n: case for n, case in enumerate(cases) if case is not None}
    rulings = judge_answers(judge, list(direct.values()), [records[n].question_id for n in direct])
    by_place = dict(zip(direct, rulings, strict=True))
    return [by_place.get(n) for n in range(len(records))]
