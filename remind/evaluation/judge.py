"""J(ŷ, y) of Eq. 9: whether a direct answer is equivalent to an acceptable one (Figure 10)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from remind.core.errors import ConfigError, RemindError
from remind.core.progress import Counter

if TYPE_CHECKING:
    from remind.states.auxiliary import AuxiliaryLLM

#: Cases put to a judge at once, where it takes several; their verdicts are kept before the next ones are asked for.
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
    from remind.llm.offline import OfflineLLM

    return OfflineLLM()


def judge_answers(judge: AuxiliaryLLM, cases: Sequence[Case]) -> list[bool | None]:
    """A verdict per case; None where the judge itself failed. See `rule`."""
    return [ruling.value for ruling in rule(judge, cases)]


def rule(
    judge: AuxiliaryLLM,
    cases: Sequence[Case],
    known: Mapping[Case, Ruling] | None = None,
    on_ruling: Callable[[int, Ruling], None] | None = None,
    samples: Sequence[str] | None = None,
) -> list[Ruling]:
    """What the judge says of each case.

    An empty prediction is rejected without asking (rule 5 of Figure 10). Equal cases are asked once.

    Args:
        known: rulings from before.
        on_ruling: called with index and ruling of each case that was not known, as they come.
        samples: ids that a judge's costs are told by, one for each case.

    Raises:
        ModelError: a judge that takes several cases at once cannot be used at all.
    """
    found: dict[Case, Ruling] = dict(known or {})
    places: dict[Case, list[int]] = {}
    for index, case in enumerate(cases):
        if case not in found:
            places.setdefault(case, []).append(index)
    asked = list(places)
    step = _AT_ONCE if hasattr(judge, "verdicts") else 1
    with Counter("judge", len(cases), len(cases) - sum(map(len, places.values()))) as bar:
        for start in range(0, len(asked), step):
            group = asked[start : start + step]
            names = [samples[places[case][0]] if samples else "" for case in group]
            for case, ruling in zip(group, _rule(judge, group, names), strict=True):
                found[case] = ruling
                for index in places[case]:
                    if on_ruling is not None:
                        on_ruling(index, ruling)
                    bar.step()
    return [found[case] for case in cases]


def _rule(judge: AuxiliaryLLM, cases: Sequence[Case], samples: Sequence[str]) -> list[Ruling]:
    rulings = [Ruling(None) if case.prediction.strip() else Ruling(False) for case in cases]
    open_ = [n for n, ruling in enumerate(rulings) if ruling.value is None]
    together = getattr(judge, "verdicts", None)
    if together is None:
        for n in open_:
            rulings[n] = _alone(judge, cases[n])
        return rulings
    if open_:
        given = together([tuple(cases[n]) for n in open_], [samples[n] for n in open_])
        for n, verdict in zip(open_, given, strict=True):
            rulings[n] = Ruling(verdict.value, verdict.failure or "", verdict.message)
    return rulings


def _alone(judge: AuxiliaryLLM, case: Case) -> Ruling:
    try:
        verdict = judge.judge(case.question, case.references, case.prediction)
    except RemindError as error:
        return Ruling(None, "error", str(error))
    if not isinstance(verdict, bool):
        return Ruling(None, "neither", f"the judge's verdict is neither true nor false but {type(verdict).__name__}")
    return Ruling(verdict)
