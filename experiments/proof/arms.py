"""The arms that are compared, what each minimises, and the conditions they are compared under."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, cast, get_args

from remind.alignment.config import Edge, Objective
from remind.core.errors import ConfigError
from remind.testbed.built import Marks
from remind.testbed.ladder import LabelConfig
from sae.ranges import NonNegativeFloat


@dataclass(frozen=True)
class Knobs:
    """Settings of a run."""

    lr: NonNegativeFloat = 5e-4
    """Peak learning rate."""
    objective: Objective = field(default_factory=Objective)
    """What is minimised; the default is the paper's."""


@dataclass(frozen=True)
class Arm:
    """One of the methods that are compared.

    Attributes:
        labels_only: it learns from labels alone; questions without one are no use to it.
        blind: it never reads a summary, so that wrong ones change nothing for it.
    """

    title: str
    knobs: Knobs
    labels_only: bool = False
    blind: bool = False


SFT = Knobs(objective=Objective(lambda_hard=1.0, edges=()))
#: Fixed targets of the base model under x1 and x2, at temperature 1; rate and share of the hard loss from dev.
RECOMMENDED = Knobs(objective=Objective(0.05, 1.0, (Edge(0, 1), Edge(0, 2)), teacher_model_kind="base"))
#: In the order of the tables.
ARMS = {
    "base": Arm("base, untrained", SFT, blind=True),
    "sft": Arm("SFT on x0, equal steps", SFT, labels_only=True, blind=True),
    "sft_flops": Arm("SFT on x0, equal FLOPs", SFT, labels_only=True, blind=True),
    "sft_mixed": Arm(
        "SFT on x0, x1, x2", Knobs(objective=replace(SFT.objective, hard_levels=(0, 1, 2))), labels_only=True
    ),
    "sft_pseudo": Arm("SFT, pseudo-labels from x2", SFT),
    "distil_20": Arm("distillation x2 → x0", Knobs(objective=Objective(edges=(Edge(0, 2),)))),
    "pra_printed": Arm("PRA as printed", Knobs()),
    "pra_recommended": Arm("PRA recommended", RECOMMENDED),
}


def knobs_of(arm: str, recommended: Knobs, chosen: Mapping[str, Any] | None = None) -> Knobs:
    """The settings of an arm.

    Args:
        recommended: settings of pra_recommended.
        chosen: values that replace the arm's own, by name.

    Raises:
        ConfigError: no such arm or setting, or settings that do not fit together.
    """
    if arm not in ARMS:
        raise ConfigError(f"no arm {arm!r}; there are {', '.join(ARMS)}")
    knobs = recommended if arm == "pra_recommended" else ARMS[arm].knobs
    values = dict(chosen or {})
    lr = values.pop("lr", knobs.lr)
    names = {field.name for field in fields(Objective)}
    if unknown := sorted(values.keys() - names):
        raise ConfigError(f"{arm} has no setting {unknown[0]!r}; there are lr, {', '.join(sorted(names))}")
    return Knobs(lr, replace(knobs.objective, **values))


Null = Literal["shuffled", "same", "marker"]


@dataclass(frozen=True)
class Condition:
    """Labels, summaries and null control of a training world.

    Attributes:
        name: of the labels alone.
        noise: share of wrong labels. labelled: questions with a label, None: all. pool: keep those without.
        wrong: share of wrong summaries.
        null: a control that takes away what a level adds. shuffled: the summary is that of another question; same: x1
            is x0; marker: as many marks, on remarks drawn at random. The other level adds nothing either, so that no
            gain is to be expected.
        marks: where the marks of built states come from; None: states made from the known evidence.
    """

    name: str
    noise: float = 0.0
    labelled: int | None = None
    pool: bool = True
    paraphrased: bool = False
    wrong: float = 0.0
    null: Null | None = None
    marks: Marks | None = None

    @property
    def title(self) -> str:
        """Name, with wrong summaries, null control and marks: none, none/wrong-0.2, none/shuffled, none/marks-gold."""
        parts = [self.name, *([f"wrong-{self.wrong:g}"] if self.wrong else []), *([self.null] if self.null else [])]
        return "/".join([*parts, *([f"marks-{self.marks}"] if self.marks else [])])

    @property
    def some_labelled(self) -> bool:
        return self.labelled != 0

    def teaches(self, arm: str) -> bool:
        """Whether an arm can learn anything of its own under it."""
        if ARMS[arm].labels_only:
            return self.some_labelled
        return arm != "sft_pseudo" or (self.labelled is not None and self.pool)

    def seen_by(self, arm: str) -> Condition:
        """Without what an arm has no use for, so that equal runs are made once."""
        seen = self
        if ARMS[arm].labels_only:
            seen = replace(seen, name=self.name.removesuffix("-pool"), pool=self.labelled is None)
        if not ARMS[arm].blind:
            return seen
        return replace(seen, wrong=0.0, null=None)

    def labels(self, seed: int) -> LabelConfig:
        return LabelConfig(self.noise, self.labelled, self.pool, self.paraphrased, seed)


def named(title: str) -> Condition:
    """The condition of a title: clean, scarce-N, scarce-N-pool, none, noisy-SHARE or paraphrased, and after a slash
    each wrong-SHARE, a null control, or marks-WHOSE.

    Raises:
        ConfigError: no such condition.
    """
    name, *parts = title.split("/")
    condition = _labelled(name)
    for part in parts:
        kind, _, value = part.partition("-")
        if part in get_args(Null):
            condition = replace(condition, null=cast(Null, part))
        elif kind == "marks" and value in get_args(Marks):
            condition = replace(condition, marks=cast(Marks, value))
        elif kind == "wrong" and re.fullmatch(r"0?\.\d+|1", value):
            condition = replace(condition, wrong=float(value))
        else:
            raise ConfigError(
                f"condition {title!r}: {part!r} is none of wrong-SHARE, shuffled, same, marker, marks-WHOSE"
            )
    return condition


def _labelled(name: str) -> Condition:
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
