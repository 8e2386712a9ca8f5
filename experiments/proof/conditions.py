"""The conditions under which arms are compared: labels, summaries, marks and null controls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from experiments.proof.arms import ARMS
from remind.core.errors import ConfigError
from remind.testbed.built import Marks
from remind.testbed.labels import LabelConfig

Null = Literal["shuffled", "same", "marker"]
Rest = Literal["empty", "keep"]


@dataclass(frozen=True)
class Condition:
    """Labels, summaries and null control of a training world.

    Attributes:
        name: of the labels alone.
        noise: share of wrong labels. labelled: questions with a label, None: all. pool: keep those without.
        wrong: share of wrong summaries.
        null: a control that takes away what a level adds. shuffled: the summary is that of another question; same: x1
            is x0; marker: as many marks, on remarks drawn at random.
        rest: what becomes of the other level in a null control. empty: it adds nothing either, so that no gain is to
            be expected; keep: it stays, and what is left of the gain is its own.
        marks: where the marks of built states come from; None: states made from the known evidence.
    """

    name: str
    noise: float = 0.0
    labelled: int | None = None
    pool: bool = True
    paraphrased: bool = False
    wrong: float = 0.0
    null: Null | None = None
    rest: Rest = "empty"
    marks: Marks | None = None

    @property
    def title(self) -> str:
        """Name, with wrong summaries, null control and marks: none, none/wrong-0.2, none/shuffled, none/marks-gold."""
        parts = [self.name, *([f"wrong-{self.wrong:g}"] if self.wrong else []), *([self.null] if self.null else [])]
        return "/".join([*parts, *([f"marks-{self.marks}"] if self.marks else [])])

    @property
    def some_unlabelled(self) -> bool:
        return self.labelled is not None and self.pool

    @property
    def some_labelled(self) -> bool:
        return self.labelled != 0

    def seen_by(self, arm: str) -> Condition:
        """Without what an arm has no use for, so that equal runs are made once."""
        seen = self
        if ARMS[arm].labels_only:
            seen = replace(seen, name=self.name.removesuffix("-pool"), pool=self.labelled is None)
        if not ARMS[arm].blind:
            return seen
        return replace(seen, wrong=0.0, null=None, rest="empty")

    def labels(self, seed: int) -> LabelConfig:
        return LabelConfig(self.noise, self.labelled, self.pool, self.paraphrased, seed)


def named(name: str) -> Condition:
    """The condition of a name: clean, scarce-N, scarce-N-pool, none, noisy-SHARE or paraphrased.

    Raises:
        ConfigError: no such condition.
    """
    kind, _, rest = name.partition("-")
    number, _, pool = rest.partition("-")
    try:
        if name == "clean":
            return Condition(name)
        if name == "none":
            return Condition(name, labelled=0)
        if name == "paraphrased":
            return Condition(name, paraphrased=True)
        if kind == "scarce" and pool in ("", "pool") and int(number) > 0:
            return Condition(name, labelled=int(number), pool=bool(pool))
        if kind == "noisy" and not pool and 0 < float(number) <= 1:
            return Condition(name, noise=float(number))
    except ValueError:
        pass
    known = "clean, scarce-60, scarce-60-pool, none, noisy-0.4, paraphrased"
    raise ConfigError(f"no condition {name!r}; there are {known} and other numbers in their place")
