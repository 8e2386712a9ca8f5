"""Which examples form the batch of a step, and which process computes which of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

import torch

#: Batches' worth of examples that are sorted by length together.
_POOL = 64


@dataclass(frozen=True)
class Order:
    """The batch of a step is a function of seed and step alone, so that a resume needs no more.

    Attributes:
        lengths: tokens of each example, where batches are formed of examples of similar length; None: any.
    """

    n_examples: int
    batch_size: int
    seed: int
    lengths: tuple[int, ...] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The last batch of an epoch may be smaller; it is not dropped."""
        return ceil(self.n_examples / self.batch_size)

    def batch(self, step: int) -> list[int]:
        """Indices of the examples of optimiser step `step` (0-based)."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._batches(epoch)[place]

    def _batches(self, epoch: int) -> list[list[int]]:
        digest = hashlib.sha256(f"{self.seed}:{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        order: list[int] = torch.randperm(self.n_examples, generator=generator).tolist()
        if self.lengths is None:
            return _cut(order, self.batch_size)
        lengths, whole = self.lengths, self.n_examples // self.batch_size
        pools = _cut(order[: whole * self.batch_size], _POOL * self.batch_size)
        sorted_pools = (sorted(pool, key=lambda index: (lengths[index], index)) for pool in pools)
        batches = [batch for pool in sorted_pools for batch in _cut(pool, self.batch_size)]
        # in a new order, or every pool would go from short to long
        mixed = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        rest = order[whole * self.batch_size :]
        return [*mixed, rest] if rest else mixed


def _cut(items: list[int], size: int) -> list[list[int]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


def share(n: int, rank: int, processes: int, size: int) -> list[list[int]]:
    """Places in a batch of `n` that process `rank` computes, cut into microbatches of at most `size`.

    Every process gets as many microbatches, because their collective operations must match; one that runs out of
    places gets an empty microbatch.
    """
    own = list(range(rank, n, processes))
    pieces = ceil(ceil(n / processes) / size)
    return [own[start * size : (start + 1) * size] for start in range(pieces)]


def padding(order: Order, lengths: Sequence[int], processes: int, size: int) -> float:
    """Share of padded positions among all that the model reads in the first epoch.

    Args:
        lengths: tokens of each example.
        size: samples of a microbatch at most.
    """
    read = kept = 0
    for step in range(order.steps_per_epoch):
        batch = order.batch(step)
        for rank in range(processes):
            for places in share(len(batch), rank, processes, size):
                chosen = [lengths[batch[place]] for place in places]
                read += max(chosen, default=0) * len(chosen)
                kept += sum(chosen)
    return 1 - kept / read if read else 0.0
