"""The arms that are compared: what each minimises, and which of the questions and states it sees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from remind.alignment.objective import Edge, Objective
from remind.alignment.step import StepKind
from remind.core.errors import ConfigError

Arm = Literal[
    "base", "sft", "sft_flops", "sft_mixed", "distil_20", "pra_printed", "pra_recommended", "sft_pseudo", "map"
]
#: In the order of the tables.
ARMS: tuple[Arm, ...] = (
    "base",
    "sft",
    "sft_flops",
    "sft_mixed",
    "sft_pseudo",
    "distil_20",
    "pra_printed",
    "pra_recommended",
)
TITLES: dict[str, str] = {
    "base": "base, untrained",
    "sft": "SFT on x0, equal steps",
    "sft_flops": "SFT on x0, equal FLOPs",
    "sft_mixed": "SFT on x0, x1, x2",
    "sft_pseudo": "SFT, pseudo-labels from x2",
    "distil_20": "distillation x2 → x0",
    "pra_printed": "PRA as printed",
    "pra_recommended": "PRA recommended",
}
#: Learn from labels alone: questions without one are no use to them.
LABELS_ONLY = frozenset({"sft", "sft_flops", "sft_mixed"})
#: Never read a summary, so that wrong ones change nothing for them.
BLIND = frozenset({"base", "sft", "sft_flops"})


@dataclass(frozen=True)
class Knobs:
    """What a run may be set to. The values here are those of the paper's objective."""

    lr: float = 5e-4
    """Peak learning rate."""
    lambda_hard: float = 0.2
    """Share of the hard loss."""
    tau: float = 2.0
    """Temperature of the distillation terms."""
    gamma: float = 3.0
    """Weight of every edge."""
    edges: tuple[tuple[int, int], ...] = ((0, 1), (1, 2))
    """Student and teacher of each edge."""
    hard_levels: tuple[int, ...] = (0,)
    """Levels with a hard loss."""
    teacher_weights: Literal["live", "base", "ema"] = "live"
    """Whose distributions the teachers' are."""
    target_grad: Literal["detach", "flow"] = "detach"
    """Whether teachers get gradients."""
    ema_decay: float = 0.98
    """Of the running average, where teachers are one."""

    def __post_init__(self) -> None:
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
            teacher_weights=self.teacher_weights,
        )

    @property
    def step(self) -> StepKind:
        return "joint" if self.target_grad == "flow" else "sequential"


def recommended() -> Knobs:
    """Fixed targets of the base model under x1 and x2, at temperature 1; rate and share of the hard loss from dev."""
    return Knobs(lr=5e-4, lambda_hard=0.05, tau=1.0, edges=((0, 1), (0, 2)), teacher_weights="base")


def knobs_of(arm: str, ours: Knobs, chosen: Mapping[str, Any] | None = None) -> Knobs:
    """The settings of an arm.

    Args:
        ours: settings of pra_recommended.
        chosen: values that replace the arm's own, by name.

    Raises:
        ConfigError: no such arm or knob, or settings that do not fit together.
    """
    hard = Knobs(lambda_hard=1.0, edges=())
    found = {
        "base": hard,
        "sft": hard,
        "sft_flops": hard,
        "sft_pseudo": hard,
        "sft_mixed": replace(hard, hard_levels=(0, 1, 2)),
        "distil_20": Knobs(edges=((0, 2),)),
        "pra_printed": Knobs(),
        "pra_recommended": ours,
    }
    if arm not in found:
        raise ConfigError(f"no arm {arm!r}; there are {', '.join(ARMS)}")
    names = {field.name for field in fields(Knobs)}
    if unknown := sorted(set(chosen or {}) - names):
        raise ConfigError(f"{arm} has no setting {unknown[0]!r}; there are {', '.join(sorted(names))}")
    return replace(found[arm], **dict(chosen or {}))
