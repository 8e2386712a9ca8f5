"""The collapse guard: teachers that get worse while the student follows them are noticed on held-out questions.

Live targets can drift: a student is drawn to a teacher that shares its weights, and both lose what they knew. The loss
then falls while the held-out cross-entropy of the teachers rises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from remind.alignment.losses import N_LEVELS
from remind.core.errors import ConfigError

GuardKind = Literal["warn", "stop", "off"]
REMEDY = (
    "set objective.teacher_weights ema or base, or objective.hard_levels [0, 1, 2], or lower trainer.lr, in a new run"
)


@dataclass(frozen=True)
class GuardConfig:
    """When held-out numbers count as a collapse."""

    mode: GuardKind = "warn"
    """warn: say and record it. stop: save, and end the run with an error. off: do not look."""
    ce_rise: float = 0.8
    """Nats per token by which the cross-entropy under any state may rise above the lowest one measured so far, the one
    before the first step included. A measured collapse raised the teacher's from 0.31 to 1.97; this is half of it."""
    entropy_share: float = 0.2
    """Share of its first value below which the entropy under a state counts as collapsed, provided the cross-entropy
    there is no lower than it was at first: sharper without being righter. A choice, not a measurement."""

    def __post_init__(self) -> None:
        if self.mode not in ("warn", "stop", "off"):
            raise ConfigError(f"guard mode is {self.mode!r}; it is warn, stop or off")
        if not 0 < self.ce_rise < float("inf"):
            raise ConfigError(f"guard ce_rise is {self.ce_rise}; it must be above 0")
        if not 0 <= self.entropy_share < 1:
            raise ConfigError(f"guard entropy_share is {self.entropy_share}; it must lie in [0, 1)")


@dataclass
class Guard:
    """Compares each measurement with those before it.

    Attributes:
        first: `ce0`, … and `entropy0`, … as first measured; empty before.
        lowest: the lowest `ce0`, … so far.
    """

    config: GuardConfig
    first: dict[str, float] = field(default_factory=dict)
    lowest: dict[str, float] = field(default_factory=dict)

    def look(self, metrics: Mapping[str, float]) -> list[str]:
        """What in a measurement looks like a collapse, one sentence each; remembers the measurement.

        Args:
            metrics: held-out means; of them `ce0`, `ce1`, `ce2` and `entropy0`, … are read, where they are there.
        """
        found: list[str] = []
        for level in range(N_LEVELS):
            ce, entropy = f"ce{level}", f"entropy{level}"
            if ce not in metrics or entropy not in metrics:
                continue
            self.first.setdefault(ce, metrics[ce])
            self.first.setdefault(entropy, metrics[entropy])
            lowest = self.lowest[ce] = min(self.lowest.get(ce, metrics[ce]), metrics[ce])
            if not metrics[ce] - lowest <= self.config.ce_rise:
                found.append(f"cross-entropy under x{level} has risen from {lowest:.3f} to {metrics[ce]:.3f}")
            if metrics[entropy] < self.config.entropy_share * self.first[entropy] and metrics[ce] >= self.first[ce]:
                found.append(
                    f"entropy under x{level} has fallen from {self.first[entropy]:.3f} to {metrics[entropy]:.3f}, "
                    f"the cross-entropy has not ({self.first[ce]:.3f}, now {metrics[ce]:.3f})"
                )
        return [] if self.config.mode == "off" else found

    def state(self) -> dict[str, dict[str, float]]:
        """What a checkpoint keeps."""
        return {"first": dict(self.first), "lowest": dict(self.lowest)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        self.first, self.lowest = dict(state["first"]), dict(state["lowest"])
