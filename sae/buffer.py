"""A shuffle buffer that mixes the tokens of many texts and resumes exactly from a saved state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from sae.errors import ActivationError, ConfigError
from sae.harvest import TokenBatch

#: The token batches of one epoch from a batch number on; the same at each call.
Source = Callable[[int], Iterable[TokenBatch]]


class ShuffleBuffer:
    """An endless iterator of training batches with the tokens of many texts in each: layer to activations [N, d].

    It is filled with the next tokens of the source, in their order, and hands them out in random order, each once; all
    layers share one permutation. At the end of an epoch fewer than `batch_size` tokens may be left out. A source that
    fits as a whole is harvested once.

    `state_dict` says where the tokens that are held begin; `load_state_dict` takes them from the source again.

    Args:
        source: gives the token batches of one epoch from a batch number on.
        batch_size, capacity: tokens per batch, and held per layer; at least 2 x batch_size.
        seed: of all permutations.
        device: where the tokens lie, and batches are handed out; None: where the source gives them.

    Attributes:
        progress: called with (tokens written, tokens wanted) while the buffer is filled.

    Raises ConfigError for a capacity too small; ActivationError on iteration for an epoch without a batch.
    """

    def __init__(
        self, source: Source, batch_size: int, capacity: int, seed: int = 0, device: torch.device | str | None = None
    ) -> None:
        if batch_size < 1 or capacity < 2 * batch_size:
            raise ConfigError(f"buffer of {capacity} tokens: must be at least 2 batches of {batch_size}")
        self.source, self.batch_size, self.device = source, batch_size, device
        # whole batches, so that none is left over within an epoch
        self.capacity = capacity - capacity % batch_size
        self.progress: Callable[[int, int], None] = lambda written, wanted: None
        self._generator = torch.Generator().manual_seed(seed)
        self._store: dict[int, Tensor] = {}
        # the rest of the epoch, and of its current batch; number and first row of what comes next, and of what is held
        self._stream: Iterator[TokenBatch] | None = None
        self._rest: TokenBatch | None = None
        self._next = self._first = (0, 0)
        self._whole = False
        # order of the slots, how many were handed out, and the generator before the order was drawn
        self._order = torch.empty(0, dtype=torch.int64)
        self._cursor = 0
        self._drawn_from = self._generator.get_state()

    def __iter__(self) -> Iterator[dict[int, Tensor]]:
        return self

    def __next__(self) -> dict[int, Tensor]:
        while self._cursor + self.batch_size > len(self._order):
            self._refill()
        slots = self._order[self._cursor : self._cursor + self.batch_size]
        self._cursor += self.batch_size
        return {layer: rows[slots.to(rows.device)] for layer, rows in self._store.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and no activations, from which iteration resumes exactly."""
        return {
            "first": list(self._first),
            "cursor": self._cursor,
            "generator": self._drawn_from,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was taken, by a buffer made with the same arguments."""
        self._generator.set_state(state["generator"])
        self._next, self._stream, self._whole = tuple(state["first"]), None, False
        self._refill()
        self._cursor = state["cursor"]

    def _refill(self) -> None:
        """Hold the next tokens (or, if they are the whole source, those held already) and draw their order."""
        held = len(self._order) if self._whole else self._fill()
        self._drawn_from = self._generator.get_state()
        self._order = torch.randperm(held, generator=self._generator)
        self._cursor = 0

    def _fill(self) -> int:
        """Write the next tokens of the epoch, or of the next one, to the store; returns how many."""
        (number, row), held = self._next, 0
        self._first = self._next
        if self._stream is None:
            self._stream, self._rest = iter(self.source(number)), None
        while held < self.capacity:
            batch = self._rest or next(self._stream, None)
            if batch is None:
                self._stream, self._next, self._whole = None, (0, 0), self._first == (0, 0)
                break
            row = row if batch.batch == number else 0
            count = min(len(batch.visual) - row, self.capacity - held)
            for layer, states in batch.activations.items():
                if layer not in self._store:
                    self._store[layer] = states.new_empty(self.capacity, states.shape[1], device=self.device)
                self._store[layer][held : held + count] = states[row : row + count]
            held += count
            done = row + count == len(batch.visual)
            self._rest = None if done else batch
            number, row = self._next = (batch.batch + 1, 0) if done else (batch.batch, row + count)
            self.progress(held, self.capacity)
        if self._whole and held < self.batch_size:
            raise ActivationError(f"{held} tokens are left, too few for one batch of {self.batch_size}")
        return held
