"""The conditions a question can be answered under, and the sets of them that the paper's figures show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from remind.core.errors import ConfigError


@dataclass(frozen=True)
class Condition:
    """What a condition shows.

    Attributes:
        title: in words, for the report.
        corpus: whether it needs the dialogue files besides the states.
        asks: whether a model answers; False: a control whose answer is fixed.
    """

    title: str
    corpus: bool = False
    asks: bool = True


CONDITIONS = {
    "no_context": Condition("no conversation at all"),
    "full_context": Condition("the whole conversation, cut at a cap", corpus=True),
    "oracle": Condition("gold evidence in place of what was retrieved, with strategy", corpus=True),
    "rag": Condition("fixed chunks closest to the question", corpus=True),
    "evidence": Condition("retrieved evidence alone"),
    "x0": Condition("evidence + strategy"),
    "x1": Condition("evidence + strategy + markers"),
    "x2": Condition("evidence + strategy + markers + summary"),
    "altered": Condition("summary made from x0, markers put after it", corpus=True),
    "always_a": Condition("control: option A whatever is asked", asks=False),
    "most_frequent": Condition("control: the most frequent answer of the training split", asks=False),
    "abstain": Condition("control: no answer ever", asks=False),
}
#: layers: Figure 4 (d). ladder: Figure 4 (a) to (c).
SETS = {
    "layers": ("x0", "x1", "x2"),
    "ladder": ("no_context", "evidence", "x0", "x1", "x2", "altered"),
    "baselines": ("no_context", "full_context", "oracle", "rag", "x0"),
    "controls": ("always_a", "most_frequent", "abstain"),
    "all": tuple(CONDITIONS),
}


def expand(names: Iterable[str]) -> tuple[str, ...]:
    """Conditions, sets spelled out, each once, in the order given.

    Raises:
        ConfigError: a name that is neither.
    """
    found: dict[str, None] = {}
    for name in names:
        if name not in CONDITIONS and name not in SETS:
            known = ", ".join((*CONDITIONS, *SETS))
            raise ConfigError(f"no condition {name!r}; there are {known}")
        found.update(dict.fromkeys(SETS.get(name, (name,))))
    if not found:
        raise ConfigError("no condition is named")
    return tuple(found)
