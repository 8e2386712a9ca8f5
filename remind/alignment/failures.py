"""What can go wrong on the machine in the middle of a run: no memory, no disk space."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError

from remind.core.errors import ModelError


class OutOfMemory(Exception):
    """No memory for a microbatch.

    Attributes:
        ids: its questions.
        lengths: tokens of each under x0, x1 and x2, answer included.
    """

    def __init__(self, ids: Sequence[str], lengths: Sequence[Sequence[int]]) -> None:
        super().__init__("out of memory")
        self.ids, self.lengths = list(ids), [list(values) for values in lengths]

    @property
    def sizes(self) -> str:
        """For a message."""
        each = (f"{name} ({'/'.join(map(str, n))})" for name, n in zip(self.ids, self.lengths, strict=True))
        return f"questions {', '.join(each)} (tokens under x0/x1/x2 with the answer)"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception of torch means that memory was short, on a device or, by its text, on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "not enough memory" in str(error)


def memory_error(error: OutOfMemory, where: str, kept: str, checkpointing: bool, chunk: int) -> ModelError:
    """In words, with what to lower in the order of what it costs.

    Args:
        kept: what can be gone on with.
        checkpointing, chunk: as they are set.
    """
    steps = []
    if len(error.ids) > 1:
        steps.append("raise trainer.gradient_accumulation")
    if not checkpointing:
        steps.append("set trainer.gradient_checkpointing true")
    if chunk > 32:
        steps.append(f"lower objective.chunk ({chunk})")
    steps.append("lower data.max_length with data.on_long skip or cut (a new run)")
    return ModelError(f"out of memory in {where}, at {error.sizes}: {', or '.join(steps)}; {kept}")


@contextmanager
def saving(path: Path, kept: str = "") -> Iterator[None]:
    """A write that fails becomes one typed line.

    Args:
        kept: what is still there and can be gone on with.

    Raises:
        ModelError: no space, no permission, a file too large.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
        hint = f"; {kept}" if kept else ""
        raise ModelError(f"{path}: cannot be written: {reason}; make room there{hint}") from None


def append_line(path: Path, line: str) -> None:
    """Add a line to a file, or nothing: what was written of it is taken back if the rest does not fit."""
    with path.open("ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        data = f"{line}\n".encode()
        try:
            while data:
                data = data[file.write(data) :]
        except OSError:
            file.truncate(size)
            raise
