"""Data parallelism: processes that train one set of coders together, each on its own part of every batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Processes:
    """A single process, or those joined by an `accelerate.Accelerator`."""

    def __init__(self, accelerator: Any = None) -> None:
        self.accelerator = accelerator
        self.count = 1 if accelerator is None else int(accelerator.num_processes)
        self.rank = 0 if accelerator is None else int(accelerator.process_index)
        self.main = self.rank == 0

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over the processes, in place; the same bits on each."""
        if self.count > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    def totals(self, values: list[int], device: torch.device) -> list[int]:
        """Sums of plain numbers over the processes."""
        if self.count == 1:
            return [int(value) for value in values]
        return self.total(torch.tensor(values, dtype=torch.int64, device=device)).tolist()

    def gather(self, rows: Tensor) -> Tensor:
        """[n, ...] of every process (n may differ), one after the other."""
        if self.count == 1:
            return rows
        from accelerate.utils import gather, gather_object, pad_across_processes

        parts = gather(pad_across_processes(rows)[None])
        return torch.cat([part[:count] for part, count in zip(parts, gather_object([len(rows)]), strict=True)])

    def wait(self) -> None:
        """Wait until every process is here."""
        if self.count > 1:
            self.accelerator.wait_for_everyone()
