"""Activations for training: one forward feeds all layers, useless tokens are dropped, the rest is shuffled.

Dropped are padding, special tokens and attention sinks: tokens whose norm is many times the median. They carry little
text and much variance, and cost a coder explained variance and live features. A token dropped for one layer is dropped
for all, so that every layer sees the same tokens in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sae.errors import ActivationError, ConfigError, ShapeError
from sae.hooks import device_of, hidden_states


@dataclass(frozen=True)
class TokenBatch:
    """The kept tokens of one forward, row by row.

    Attributes:
        activations: layer to [N, d].
        visual: [N] bool, image or video tokens.
        rows, positions: [N] int64, where each token stood in the batch [B, T].
        batch: number of the batch, from 0.
    """

    activations: dict[int, Tensor]
    visual: Tensor
    rows: Tensor
    positions: Tensor
    batch: int


@dataclass
class HarvestStats:
    """Counts of a harvest. `tokens` = kept + padding + special + sinks + those of `skipped` batches."""

    batches: int = 0
    tokens: int = 0
    kept: int = 0
    visual: int = 0
    padding: int = 0
    special: int = 0
    sinks: int = 0
    skipped: int = 0


def harvest(
    model: nn.Module,
    batches: Iterable[Mapping[str, Any]],
    layers: Sequence[int],
    *,
    special_ids: Collection[int] = (),
    visual_ids: Collection[int] | None = None,
    sink_factor: float | None = 10.0,
    skip_nonfinite: bool = False,
    device: torch.device | str | None = None,
    stats: HarvestStats | None = None,
) -> Iterator[TokenBatch]:
    """Run the model over `batches` without gradient and yield the kept tokens of each.

    Args:
        model: a Hugging Face model, in eval mode.
        batches: inputs of the model: input_ids [B, T], optionally attention_mask [B, T] (1 for tokens) and anything
            else its forward takes (position_ids, pixel_values, image_grid_thw, ...), passed through.
        layers: as in `sae.hooks`.
        special_ids: tokens to drop ([CLS], <|im_start|>, ...). Visual tokens are kept even where listed here.
        visual_ids: tokens that stand for pixels; None: what the configuration names (image_token_id, video_token_id).
        sink_factor: a token is a sink where, at any layer, its norm exceeds this many times the median norm of the kept
            text (or visual) tokens of its batch; None: keep all.
        skip_nonfinite: leave out a batch with values that are not finite, and count it, instead of raising.
        device: where the activations go; None: they stay with the model.
        stats: counts to add to.

    Raises:
        ActivationError: values that are not finite, naming batch and layer.
        LayerError: a layer out of range.
        ShapeError: an attention mask that is not [B, T].
    """
    counts = HarvestStats() if stats is None else stats
    choice = TokenChoice(model, special_ids=special_ids, visual_ids=visual_ids, sink_factor=sink_factor)
    for number, batch in enumerate(batches):
        inputs = {
            name: value.to(device_of(model)) if isinstance(value, Tensor) else value for name, value in batch.items()
        }
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            raise ShapeError(f"batch {number}: attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}")
        with torch.no_grad():
            states = hidden_states(model, layers, **inputs)
        counts.batches += 1
        counts.tokens += ids.numel()
        chosen = choice(ids, mask, states)
        broken = [layer for layer, state in states.items() if not bool(torch.isfinite(state[chosen.wanted]).all())]
        if broken:
            if not skip_nonfinite:
                raise ActivationError(
                    f"batch {number}: hidden states of layer {broken[0]} are not finite; load the model in bfloat16 or "
                    "float32, or skip such batches (skip_nonfinite)"
                )
            counts.skipped += 1
            continue
        keep, visual = chosen.keep, chosen.visual
        wanted, real = int(chosen.wanted.sum()), ids.numel() if mask is None else int(mask.bool().sum())
        rows, positions = keep.nonzero(as_tuple=True)
        counts.padding += ids.numel() - real
        counts.special += real - wanted
        counts.kept += len(rows)
        counts.sinks += wanted - len(rows)
        counts.visual += int(visual[keep].sum())
        if len(rows):
            target = rows.device if device is None else device
            yield TokenBatch(
                activations={layer: state[keep].to(target) for layer, state in states.items()},
                visual=visual[keep].to(target),
                rows=rows.to(target),
                positions=positions.to(target),
                batch=number,
            )


class Chosen(NamedTuple):
    """[B, T] bool each: tokens used; the same before sinks were dropped; image and video tokens."""

    keep: Tensor
    wanted: Tensor
    visual: Tensor


class TokenChoice:
    """Which tokens of a batch a coder learns from and is judged on; the arguments are those of `harvest`."""

    def __init__(
        self,
        model: nn.Module,
        *,
        special_ids: Collection[int] = (),
        visual_ids: Collection[int] | None = None,
        sink_factor: float | None = 10.0,
    ) -> None:
        self._special = _ids(special_ids, model)
        self._visual = _ids(_visual_ids(model) if visual_ids is None else visual_ids, model)
        self._sink_factor = sink_factor

    def __call__(self, ids: Tensor, mask: Tensor | None, states: Mapping[int, Tensor]) -> Chosen:
        """ids, mask: [B, T]; states: layer to [B, T, d]."""
        visual = torch.isin(ids, self._visual)
        wanted = visual | ~torch.isin(ids, self._special)
        if mask is not None:
            wanted &= mask.bool()
        keep = wanted
        if self._sink_factor is not None:
            keep = wanted & ~_sinks(states, wanted, visual, self._sink_factor)
        return Chosen(keep, wanted, visual)


def _sinks(states: Mapping[int, Tensor], keep: Tensor, visual: Tensor, factor: float) -> Tensor:
    """[B, T] bool. Text and visual tokens live on different scales, so each kind has its own median."""
    sinks = torch.zeros_like(keep)
    for state in states.values():
        norms = torch.linalg.vector_norm(state, dim=-1, dtype=torch.promote_types(state.dtype, torch.float32))
        for kind in (keep & visual, keep & ~visual):
            if bool(kind.any()):
                sinks |= kind & (norms > factor * norms[kind].median())
    return sinks


def _visual_ids(model: nn.Module) -> list[int]:
    config = getattr(model, "config", None)
    found = (getattr(config, name, None) for name in ("image_token_id", "video_token_id"))
    return [token for token in found if isinstance(token, int)]


def _ids(ids: Collection[int], model: nn.Module) -> Tensor:
    return torch.tensor(sorted(ids), dtype=torch.int64, device=device_of(model))


class Shuffled(NamedTuple):
    """A training batch: layer to [N, d], and which tokens are visual [N]."""

    activations: dict[int, Tensor]
    visual: Tensor


class ShuffleBuffer:
    """Mixes tokens of many texts: a preallocated store of `capacity` tokens per layer, refilled by half.

    When the store is full, half of it is handed out in random order and refilled; what is left at the end of an epoch
    is handed out too. Each token comes exactly once per epoch, and all layers share one permutation. A source that
    fits into the store is harvested once; later epochs permute what is there.

    Args:
        source: gives the token batches of one epoch; called anew for each epoch that does not fit.
        batch_size: tokens per batch.
        capacity: tokens held per layer; at least 2 x batch_size.
        seed: of all permutations.
        epochs: how often to go through the source; None: for ever.
        drop_last: leave out the short batch at the end of an epoch.

    Raises:
        ConfigError: a capacity too small.
        ActivationError: (on iteration) an epoch without a single batch to hand out.
    """

    def __init__(
        self,
        source: Callable[[], Iterable[TokenBatch]],
        batch_size: int,
        capacity: int,
        seed: int = 0,
        epochs: int | None = 1,
        drop_last: bool = False,
    ) -> None:
        if batch_size < 1 or capacity < 2 * batch_size:
            raise ConfigError(f"buffer of {capacity} tokens: must be at least 2 batches of {batch_size}")
        self.source, self.batch_size, self.capacity = source, batch_size, capacity
        self.epochs, self.drop_last = epochs, drop_last
        self.epoch = 0
        self._generator = torch.Generator().manual_seed(seed)
        self._store: dict[int, Tensor] = {}
        self._visual = torch.empty(0)

    def __iter__(self) -> Iterator[Shuffled]:
        resident: int | None = None
        while self.epochs is None or self.epoch < self.epochs:
            given = 0
            if resident is None:
                stream = _Stream(iter(self.source()))
                slots = torch.arange(self.capacity)
                filled = self._fill(stream, slots)
                while filled == self.capacity and not stream.exhausted():
                    order = self._permuted(slots)
                    half = max(self.capacity // 2 // self.batch_size, 1) * self.batch_size
                    for chunk in order[:half].split(self.batch_size):
                        yield self._take(chunk)
                    given += half
                    count = self._fill(stream, order[:half])
                    slots = torch.cat([order[half:], order[:count]])
                    filled = len(slots)
                if not given:
                    resident = filled
                rest = self._permuted(slots[:filled])
            else:
                rest = self._permuted(torch.arange(resident))
            for chunk in rest.split(self.batch_size):
                if len(chunk) == self.batch_size or (len(chunk) and not self.drop_last):
                    yield self._take(chunk)
                    given += len(chunk)
            if not given:
                raise ActivationError(
                    f"{len(rest)} tokens are left after masking, too few for one batch of {self.batch_size}"
                )
            self.epoch += 1

    def _fill(self, stream: _Stream, slots: Tensor) -> int:
        """Write tokens of the stream to these slots, in order; returns how many were written."""
        written = 0
        while written < len(slots) and (part := stream.take(len(slots) - written)) is not None:
            if not self._store:
                self._allocate(part)
            where = slots[written : written + len(part.visual)].to(part.visual.device)
            for layer, rows in part.activations.items():
                self._store[layer].index_copy_(0, where, rows)
            self._visual.index_copy_(0, where, part.visual)
            written += len(part.visual)
        return written

    def _allocate(self, part: Shuffled) -> None:
        self._store = {layer: rows.new_empty(self.capacity, rows.shape[-1]) for layer, rows in part.activations.items()}
        self._visual = part.visual.new_empty(self.capacity)

    def _permuted(self, slots: Tensor) -> Tensor:
        return slots[torch.randperm(len(slots), generator=self._generator)]

    def _take(self, slots: Tensor) -> Shuffled:
        where = slots.to(self._visual.device)
        return Shuffled({layer: rows[where] for layer, rows in self._store.items()}, self._visual[where])


class _Stream:
    """Token batches, to be taken in pieces of any size."""

    def __init__(self, batches: Iterator[TokenBatch]) -> None:
        self._batches = batches
        self._current: TokenBatch | None = None
        self._start = 0

    def exhausted(self) -> bool:
        while self._current is None or self._start == len(self._current.visual):
            self._current = next(self._batches, None)
            self._start = 0
            if self._current is None:
                return True
        return False

    def take(self, most: int) -> Shuffled | None:
        """At most that many tokens; None at the end."""
        if self.exhausted():
            return None
        assert self._current is not None
        piece = slice(self._start, self._start + most)
        part = Shuffled({k: v[piece] for k, v in self._current.activations.items()}, self._current.visual[piece])
        self._start += len(part.visual)
        return part
