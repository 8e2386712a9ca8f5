"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from remind.errors import ConfigError, RemindError
from remind.progress import track

if TYPE_CHECKING:
    from remind.llm.base import AuxiliaryLLM


class Case(NamedTuple):
    """What the judge sees."""

    question: str
    references: tuple[str, ...]
    prediction: str


def load_judge(name: str) -> AuxiliaryLLM:
    """The judge of that name. "offline" is a rule, not a model: its verdicts compare with one another only.

    Raises:
        ConfigError: no such judge.
    """
    if name != "offline":
        raise ConfigError(f"no judge {name!r}; there is: offline (any other AuxiliaryLLM can be passed to evaluate())")
    from remind.llm.offline import OfflineLLM

    return OfflineLLM()


def judge_answers(judge: AuxiliaryLLM, cases: Sequence[Case]) -> list[bool | None]:
    """A verdict per case; None where the judge itself failed, which is no verdict on the answer.

    An empty prediction is rejected without asking (rule 5 of Figure 10). Equal cases are asked once.
    """
    known: dict[Case, bool | None] = {}
    verdicts = []
    for case in track(cases, "judge", len(cases)):
        if case not in known:
            known[case] = _verdict(judge, case)
        verdicts.append(known[case])
    return verdicts


def _verdict(judge: AuxiliaryLLM, case: Case) -> bool | None:
    if not case.prediction.strip():
        return False
    try:
        return bool(judge.judge(case.question, case.references, case.prediction))
    except RemindError:
        return None
