"""A shuffle buffer that mixes the tokens of many texts and resumes exactly from a saved state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sae.errors import ActivationError, ConfigError
from sae.harvest import TokenBatch

#: The token batches of one epoch from a batch number on; the same at each call.
Source = Callable[[int], Iterable[TokenBatch]]


class Shuffled(NamedTuple):
    """A training batch: layer to [N, d], and which tokens are visual [N]."""

    activations: dict[int, Tensor]
    visual: Tensor


class ShuffleBuffer:
    """Training batches with the tokens of many texts in each; an iterator.

    When its store is full, half of it is handed out in random order and refilled. Each token comes exactly once per
    epoch, and all layers share one permutation. A source that fits into the store is harvested once.

    `state_dict` says which token lies in which slot; `load_state_dict` takes those tokens from the source again.

    Args:
        source: gives the token batches of one epoch from a batch number on.
        batch_size, capacity: tokens per batch, and held per layer; at least 2 x batch_size.
        seed: of all permutations.
        epochs: how often to go through the source; None: without end.
        drop_last: leave out the short batch at the end of an epoch.
        device: where the tokens lie, and batches are handed out; None: where the source gives them.

    Attributes:
        progress: called with (tokens written, tokens wanted) while the store is filled or refilled.

    Raises ConfigError for a capacity too small; ActivationError on iteration for an epoch without a batch, and on
    loading a state for another source.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        capacity: int,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        if batch_size < 1 or capacity < 2 * batch_size:
            raise ConfigError(f"buffer of {capacity} tokens: must be at least 2 batches of {batch_size}")
        self.source, self.batch_size, self.capacity = source, batch_size, capacity
        self.epochs, self.drop_last = epochs, drop_last
        self.progress: Callable[[int, int], None] = lambda written, wanted: None
        self.device = None if device is None else torch.device(device)
        self.epoch = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._store: dict[int, Tensor] = {}
        self._visual = torch.empty(0)
        # batch number and index in it of the token in each slot
        self._origin = torch.zeros(capacity, 2, dtype=torch.int64)
        self._stream: _Stream | None = None
        # of the round: slots being handed out, how many are gone, and the slots that stay meanwhile
        self._slots = torch.empty(0, dtype=torch.int64)
        self._cursor = 0
        self._kept = torch.empty(0, dtype=torch.int64)
        self._last = True
        # batches handed out in this epoch, and tokens of a source that fits into the store
        self._given = self._resident = 0

    def __iter__(self) -> Iterator[Shuffled]:
        return self

    def __next__(self) -> Shuffled:
        while True:
            slots = self._slots[self._cursor : self._cursor + self.batch_size]
            self._cursor += len(slots)
            if len(slots) == self.batch_size or (len(slots) and not self.drop_last):
                self._given += 1
                where = slots.to(self._visual.device)
                return Shuffled({layer: rows[where] for layer, rows in self._store.items()}, self._visual[where])
            if not self._next_round():
                raise StopIteration

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, and tensors without activations, from which iteration resumes exactly."""
        return {
            "source": self.source.state_dict() if hasattr(self.source, "state_dict") else None,
            "epoch": self.epoch,
            **{name: getattr(self, f"_{name}") for name in ("cursor", "last", "given", "resident")},
            "position": list(self._stream.position()) if self._stream is not None else None,
            **{name: getattr(self, f"_{name}").clone() for name in ("slots", "kept", "origin")},
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume where `state_dict` was taken, by a buffer made with the same arguments."""
        if len(state["origin"]) != self.capacity:
            raise ActivationError(f"the state is of a buffer of {len(state['origin'])} tokens, not {self.capacity}")
        if state["source"] is not None and hasattr(self.source, "load_state_dict"):
            self.source.load_state_dict(state["source"])
        self.epoch, self._cursor = int(state["epoch"]), int(state["cursor"])
        self._last, self._given = bool(state["last"]), int(state["given"])
        self._resident = int(state["resident"])
        self._slots, self._kept, self._origin = (state[name].clone() for name in ("slots", "kept", "origin"))
        self._generator.set_state(state["generator"].to(torch.uint8))
        self._stream = None
        position = state["position"]
        needed = torch.cat([self._slots[self._cursor :], self._kept])
        if self._resident:
            needed = torch.arange(self._resident)
        if not self._last and position is not None:
            self._stream = self._harvest_again(needed, int(position[0]), int(position[1]))
        elif len(needed):
            self._harvest_again(needed, None, 0)
        if position is not None and self._stream is None:
            self._stream = _Stream(iter(()))

    def _harvest_again(self, slots: Tensor, batch: int | None, start: int) -> _Stream:
        """Put the tokens of `_origin` into these slots; the stream returned goes on at token `start` of `batch`."""
        batches, indices = self._origin[slots].unbind(1)
        stop = int(batches.max()) if batch is None else batch
        source = iter(self.source(int(batches.min()) if len(slots) else stop))
        written = 0
        for tokens in source:
            mine = (batches == tokens.batch).nonzero().squeeze(1)
            if len(mine):
                if int(indices[mine].max()) >= len(tokens.visual):
                    break
                self._write(slots[mine], tokens, indices[mine])
                written += len(mine)
                self.progress(written, len(slots))
            if tokens.batch >= stop:
                if written < len(slots) or (batch is not None and tokens.batch != batch):
                    break
                return _Stream(source, tokens, start)
        if written < len(slots) or batch is not None:
            raise ActivationError("the source lacks tokens of the saved state; the data have changed")
        return _Stream(iter(()))

    def _next_round(self) -> bool:
        """Refill, or begin an epoch; False after the last one."""
        if not self._last:
            assert self._stream is not None
            count = self._fill(self._stream, self._slots)
            self._begin(self._stream, torch.cat([self._kept, self._slots[:count]]))
            return True
        if self._stream is not None or self._resident:
            if not self._given:
                count = len(self._slots)
                raise ActivationError(f"{count} tokens are left, too few for one batch of {self.batch_size}")
            self.epoch += 1
        if self.epochs is not None and self.epoch >= self.epochs:
            return False
        self._given = 0
        if self._resident:
            self._slots, self._cursor = self._permuted(torch.arange(self._resident)), 0
            return True
        self._stream = _Stream(iter(self.source(0)))
        slots = torch.arange(self.capacity)
        slots = slots[: self._fill(self._stream, slots)]
        self._begin(self._stream, slots)
        if self._last:
            self._resident = len(slots)
        return True

    def _begin(self, stream: _Stream, slots: Tensor) -> None:
        order = self._permuted(slots)
        # only a full store asks the stream: the answer may cost a forward
        self._last = len(slots) < self.capacity or stream.exhausted()
        half = max(self.capacity // 2 // self.batch_size, 1) * self.batch_size
        self._slots, self._kept = (order, order[:0]) if self._last else (order[:half], order[half:])
        self._cursor = 0

    def _fill(self, stream: _Stream, slots: Tensor) -> int:
        """Write tokens of the stream to these slots, in order; returns how many were written."""
        written = 0
        while written < len(slots) and (part := stream.take(len(slots) - written)) is not None:
            batch, rows = part
            self._write(slots[written : written + len(rows)], batch, rows)
            written += len(rows)
            self.progress(written, len(slots))
        return written

    def _write(self, slots: Tensor, batch: TokenBatch, rows: Tensor) -> None:
        source = batch.visual.device
        device = self.device or source
        if not self._store:
            self._store = {
                layer: states.new_empty(self.capacity, states.shape[-1], device=device)
                for layer, states in batch.activations.items()
            }
            self._visual = batch.visual.new_empty(self.capacity, device=device)
        where, which = slots.to(device), rows.to(source)
        for layer, states in batch.activations.items():
            self._store[layer].index_copy_(0, where, states.index_select(0, which).to(device))
        self._visual.index_copy_(0, where, batch.visual.index_select(0, which).to(device))
        self._origin[slots, 0] = batch.batch
        self._origin[slots, 1] = rows

    def _permuted(self, slots: Tensor) -> Tensor:
        return slots[torch.randperm(len(slots), generator=self._generator)]


class _Stream:
    """Token batches, to be taken in pieces of any size."""

    def __init__(self, batches: Iterator[TokenBatch], current: TokenBatch | None = None, start: int = 0) -> None:
        self._batches, self._current, self._start = batches, current, start

    def position(self) -> tuple[int, int]:
        """Number of the current batch, and how many of its tokens are taken."""
        return (-1, 0) if self._current is None else (self._current.batch, self._start)

    def exhausted(self) -> bool:
        while self._current is None or self._start == len(self._current.visual):
            self._current = next(self._batches, None)
            self._start = 0
            if self._current is None:
                return True
        return False

    def take(self, most: int) -> tuple[TokenBatch, Tensor] | None:
        """The current batch and the indices of its next tokens, at most that many; None at the end."""
        if self.exhausted():
            return None
        assert self._current is not None
        rows = torch.arange(self._start, min(self._start + most, len(self._current.visual)))
        self._start += len(rows)
        return self._current, rows
