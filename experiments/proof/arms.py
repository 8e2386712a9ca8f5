"""The arms that are compared: what each minimises, and which of the questions and states it sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from remind.alignment.config import Edge, Level, Objective
from remind.core.errors import ConfigError
from sae.ranges import NonNegativeFloat, PositiveFloat, Share, ShareBelowOne, check_ranges


@dataclass(frozen=True)
class Knobs:
    """Settings of a run. The defaults are those of the paper's objective."""

    lr: NonNegativeFloat = 5e-4
    """Peak learning rate."""
    lambda_hard: Share = 0.2
    """Share of the hard loss."""
    tau: PositiveFloat = 2.0
    """Temperature of the distillation terms."""
    gamma: NonNegativeFloat = 3.0
    """Weight of every edge."""
    edges: tuple[tuple[Level, Level], ...] = ((0, 1), (1, 2))
    """Student and teacher of each edge."""
    hard_levels: tuple[Level, ...] = (0,)
    """Levels with a hard loss."""
    teacher_weights: Literal["live", "base", "ema"] = "live"
    """Weights that the teachers' distributions are computed with."""
    target_grad: Literal["detach", "flow"] = "detach"
    """Whether teachers get gradients."""
    ema_decay: ShareBelowOne = 0.98
    """Of the running average, where teachers are one."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        object.__setattr__(self, "edges", tuple((int(student), int(teacher)) for student, teacher in self.edges))
        object.__setattr__(self, "hard_levels", tuple(self.hard_levels))
        self.objective  # noqa: B018  (a setting that cannot work shows here, not hours later)

    @property
    def objective(self) -> Objective:
        """As the trainer takes it. Raises ConfigError for settings that do not fit together."""
        return Objective(
            lambda_hard=self.lambda_hard,
            tau=self.tau,
            edges=tuple(Edge(student, teacher, self.gamma) for student, teacher in self.edges),
            target_grad=self.target_grad,
            hard_levels=self.hard_levels,
            teacher_model_kind=self.teacher_weights,
            ema_decay=self.ema_decay,
        )


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


SFT = Knobs(lambda_hard=1.0, edges=())
#: Fixed targets of the base model under x1 and x2, at temperature 1; rate and share of the hard loss from dev.
RECOMMENDED = Knobs(lr=5e-4, lambda_hard=0.05, tau=1.0, edges=((0, 1), (0, 2)), teacher_weights="base")
#: In the order of the tables.
ARMS = {
    "base": Arm("base, untrained", SFT, blind=True),
    "sft": Arm("SFT on x0, equal steps", SFT, labels_only=True, blind=True),
    "sft_flops": Arm("SFT on x0, equal FLOPs", SFT, labels_only=True, blind=True),
    "sft_mixed": Arm("SFT on x0, x1, x2", replace(SFT, hard_levels=(0, 1, 2)), labels_only=True),
    "sft_pseudo": Arm("SFT, pseudo-labels from x2", SFT),
    "distil_20": Arm("distillation x2 → x0", Knobs(edges=((0, 2),))),
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
    values = dict(chosen or {})
    names = {field.name for field in fields(Knobs)}
    if unknown := sorted(values.keys() - names):
        raise ConfigError(f"{arm} has no setting {unknown[0]!r}; there are {', '.join(sorted(names))}")
    return replace(recommended if arm == "pra_recommended" else ARMS[arm].knobs, **values)
