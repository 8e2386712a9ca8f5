"""The processes of a run: each its share of a batch in microbatches, and what they must agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn

from remind.alignment.data import Examples
from remind.alignment.example import Example
from remind.alignment.failures import OutOfMemory, is_out_of_memory
from remind.alignment.order import share
from remind.alignment.step import AlignmentModel, Pass, collate, run
from remind.alignment.teachers import Live, Teachers
from remind.core.distributed import sharded


class Workers:
    """The accelerator with the module it prepared.

    Args:
        batch_size: samples of an optimiser step over all processes.
    """

    def __init__(self, accelerator: Any, module: nn.Module, batch_size: int) -> None:
        self.accelerator, self.module, self.batch_size = accelerator, module, batch_size

    @property
    def model(self) -> nn.Module:
        """The language model itself, without the wrappers of the step and of accelerate."""
        module: AlignmentModel = self.accelerator.unwrap_model(self.module)
        return module.model

    def unsynced(self) -> AbstractContextManager[Any]:
        # holding back FSDP's reduction keeps whole gradients in memory
        return nullcontext() if sharded(self.accelerator) else self.accelerator.no_sync(self.module)

    def backward(self, loss: Tensor) -> None:
        # gradients are averaged over processes, ours are shares of one global mean
        self.accelerator.backward(loss * self.accelerator.num_processes)

    def go_through(
        self,
        examples: Examples,
        indices: Sequence[int],
        passes: Sequence[Pass],
        backward: Callable[[Tensor], None] | None,
        pieces: int,
        teachers: Teachers,
    ) -> dict[str, Tensor]:
        """Passes over the examples, each process its share; values by name for all of them, [len(indices)] float64.

        Args:
            pieces: microbatches into which each process cuts its share of a whole batch.

        Raises:
            OutOfMemory: on the process where it happened.
        """
        accelerator, n = self.accelerator, len(indices)
        size = ceil(self.batch_size / accelerator.num_processes / pieces)
        places = share(n, accelerator.process_index, accelerator.num_processes, size)
        # a process without samples left goes along with a weight of 0: its peers wait for it
        chosen = [[examples.items[indices[place]] for place in own or [0]] for own in places]
        batches = [
            collate(some, [1 / n if own else 0.0] * len(some)).to(accelerator.device)
            for own, some in zip(places, chosen, strict=True)
        ]
        fixed = self._in_memory(chosen[0], partial(teachers.of, self.module, chosen, batches))
        found: dict[str, Tensor] = {}
        for number, (own, batch) in enumerate(zip(places, batches, strict=True)):
            sync = number == len(places) - 1
            step = partial(run, self.module, batch, passes, backward, self.unsynced, sync, fixed[number] or None)
            values = self._in_memory(chosen[number], step)
            for name, value in values.items():
                out = found.setdefault(name, torch.zeros(n, dtype=value.dtype, device=value.device))
                if own:
                    out[own] = value
        names = sorted(found)
        gathered: Tensor = accelerator.reduce(torch.stack([found[name] for name in names]), "sum")
        return dict(zip(names, gathered.cpu(), strict=True))

    @torch.no_grad()
    def held_out(self, examples: Examples, pieces: int, stop: Callable[[int], bool]) -> dict[str, Tensor] | None:
        """Values of all examples under x0, x1 and x2, teachers live: by name [len(examples)].

        Args:
            stop: told after each batch how many are done; if any process says yes, all break off: the result is None.
        """
        self.module.eval()
        found: dict[str, list[Tensor]] = {}
        for start in range(0, len(examples), self.batch_size):
            indices = range(start, min(start + self.batch_size, len(examples)))
            passes = (Pass((0, 1, 2), False),)
            for name, value in self.go_through(examples, indices, passes, None, pieces, Live()).items():
                found.setdefault(name, []).append(value)
            if self.any(stop(indices.stop)):
                return None
        self.module.train()
        return {name: torch.cat(values) for name, values in found.items()}

    def _in_memory(self, chosen: list[Example], work: Callable[[], Any]) -> Any:
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        # raised outside of the handler: the error there holds the frames, and they hold what fills the memory
        lengths = [[len(prompt) + len(example.answer) for prompt in example.prompts] for example in chosen]
        raise OutOfMemory([example.id for example in chosen], lengths)

    def gather(self, *numbers: float) -> Tensor:
        """Numbers of each process, [processes, len(numbers)] float64."""
        row = torch.tensor([numbers], dtype=torch.float64, device=self.accelerator.device)
        gathered: Tensor = self.accelerator.gather(row)
        return gathered.cpu()

    def any(self, wish: bool) -> bool:
        """Whether any process wishes it; every process gets the same answer."""
        return bool(self.gather(float(wish)).any())
