"""What can end a run early: a collapse on held-out questions, and too little memory.

Live targets can drift: a student is drawn to a teacher that shares its weights, and both lose what they knew. The loss
then falls while the held-out cross-entropy of the teachers rises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from remind.alignment.config import N_LEVELS, GuardConfig
from remind.alignment.tokens import Example
from remind.core.errors import ModelError

REMEDY = (
    "set objective.teacher_weights ema or base, or objective.hard_levels [0, 1, 2], or lower trainer.lr, in a new run"
)
#: Cross-entropy of right answers and entropy, in nats per token, above which a model guesses (among 400 tokens, 50).
#: A cross-entropy alone may be high for want of the answers' form, of which a model that knows the language is sure.
UNFAMILIAR = (6.0, 4.0)


@dataclass
class Guard:
    """Compares each measurement with those before it, and the first with what a language model must know.

    Attributes:
        first: `ce0`, … and `entropy0`, … as first measured; empty before.
        lowest: the lowest `ce0`, … so far.
        told: whether it has been said that the model guesses.
    """

    config: GuardConfig
    first: dict[str, float] = field(default_factory=dict)
    lowest: dict[str, float] = field(default_factory=dict)
    told: bool = False

    def collapses(self, metrics: Mapping[str, float]) -> list[str]:
        """What in a measurement looks like a collapse, one sentence each; remembers the measurement.

        Args:
            metrics: held-out means; of them `ce0`, `ce1`, `ce2` and `entropy0`, … are read, where they are there.
        """
        collapses: list[str] = []
        for level in range(N_LEVELS):
            ce, entropy = f"ce{level}", f"entropy{level}"
            if ce not in metrics or entropy not in metrics:
                continue
            self.first.setdefault(ce, metrics[ce])
            self.first.setdefault(entropy, metrics[entropy])
            lowest = self.lowest[ce] = min(self.lowest.get(ce, metrics[ce]), metrics[ce])
            if not metrics[ce] - lowest <= self.config.ce_rise:
                collapses.append(f"cross-entropy under x{level} has risen from {lowest:.3f} to {metrics[ce]:.3f}")
            if metrics[entropy] < self.config.entropy_share * self.first[entropy] and metrics[ce] >= self.first[ce]:
                collapses.append(
                    f"entropy under x{level} has fallen from {self.first[entropy]:.3f} to {metrics[entropy]:.3f}, "
                    f"the cross-entropy has not ({self.first[ce]:.3f}, now {metrics[ce]:.3f})"
                )
        return [] if self.config.mode == "off" else collapses

    def unfamiliar(self, metrics: Mapping[str, float], model: str) -> str | None:
        """What to say, once, of a model that guesses (`ce0` and `entropy0` above `UNFAMILIAR`), or None."""
        ce, entropy = metrics["ce0"], metrics["entropy0"]
        if self.config.mode == "off" or self.told or not (ce > UNFAMILIAR[0] and entropy > UNFAMILIAR[1]):
            return None
        self.told = True
        return (
            f"{model} guesses: under x0 its held-out loss is {ce:.1f} nats per token, its entropy {entropy:.1f}; it "
            "does not know the language of these answers, and a short training will not teach it; choose another model"
        )

    def state(self) -> dict[str, dict[str, float]]:
        """What a checkpoint keeps."""
        return {"first": dict(self.first), "lowest": dict(self.lowest)}

    def restore(self, state: Mapping[str, Mapping[str, float]]) -> None:
        self.first, self.lowest = dict(state["first"]), dict(state["lowest"])


class OutOfMemory(Exception):
    """No memory for a microbatch.

    Attributes:
        ids: its questions.
        lengths: tokens of each under x0, x1 and x2, answer included.
    """

    def __init__(self, examples: Sequence[Example]) -> None:
        super().__init__("out of memory")
        self.ids = [example.id for example in examples]
        self.lengths = [[len(prompt) + len(example.answer) for prompt in example.prompts] for example in examples]


def in_memory(examples: Sequence[Example], work: Callable[[], Any]) -> Any:
    """Do the work on some examples. Raises OutOfMemory, which names them."""
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
    # raised outside of the handler: the error there holds the frames, and they hold what fills the memory
    raise OutOfMemory(examples)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch means that memory was short, on a device or, by its text, on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def memory_error(error: OutOfMemory, where: str, remaining: str) -> ModelError:
    """The error to show, with the settings to change in the order of what they cost.

    Args:
        remaining: what can be gone on with.
    """
    each = (f"{name} ({'/'.join(map(str, n))})" for name, n in zip(error.ids, error.lengths, strict=True))
    return ModelError(
        f"out of memory in {where}, at questions {', '.join(each)} (tokens under x0/x1/x2 with the answer): raise "
        "trainer.gradient_accumulation, set trainer.gradient_checkpointing true, lower objective.chunk, or lower "
        f"data.max_length with data.on_long skip (a new run); {remaining}"
    )
