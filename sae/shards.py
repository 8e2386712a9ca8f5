"""Shards of an activation cache: token batches in one safetensors file, of which a batch is read without the rest."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sae import files
from sae.errors import FormatError, ShapeError
from sae.harvest import TokenBatch

# layer to width and dtype
Layout = dict[int, tuple[int, torch.dtype]]

_LABEL = "activation_cache"
ADVICE = "delete the folder to harvest again, or call repair() to keep the shards before this one"
_PLACES = {"visual": torch.bool, "rows": torch.int64, "positions": torch.int64}
_PREFIX = "layer_"


def token_bytes(layout: Layout) -> int:
    """Bytes of one token on disk."""
    return sum(d * dtype.itemsize for d, dtype in layout.values()) + sum(dtype.itemsize for dtype in _PLACES.values())


def layout_of(batch: TokenBatch, expected: Layout | None) -> Layout:
    """Widths and dtypes of a batch. Raises ShapeError where it is not like the batches before it."""
    count = len(batch.visual)
    for layer, h in batch.activations.items():
        if h.ndim != 2 or len(h) != count:
            raise ShapeError(f"batch {batch.batch}, layer {layer}: {list(h.shape)} for {count} tokens, must be [N, d]")
    if not batch.rows.shape == batch.positions.shape == batch.visual.shape == (count,):
        raise ShapeError(f"batch {batch.batch}: rows, positions and visual must each be [{count}]")
    layout = {layer: (h.shape[1], h.dtype) for layer, h in sorted(batch.activations.items())}
    if not layout or (expected is not None and layout != expected):
        raise ShapeError(f"batch {batch.batch} holds {_words(layout)}, the batches before it {_words(expected or {})}")
    return layout


def _words(layout: Layout) -> str:
    return ", ".join(f"layer {layer} [N, {d}] {dtype}" for layer, (d, dtype) in layout.items()) or "no layer"


class ShardWriter:
    """Token batches on their way to a shard, copied to memory that serves one shard after another."""

    def __init__(self, layout: Layout, capacity: int) -> None:
        self._layout = layout
        self._numbers: list[int] = []
        self._bounds = [0]
        self._allocate(capacity)

    @property
    def tokens(self) -> int:
        return self._bounds[-1]

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self._layers = {layer: torch.empty(capacity, d, dtype=dtype) for layer, (d, dtype) in self._layout.items()}
        self._places = {name: torch.empty(capacity, dtype=dtype) for name, dtype in _PLACES.items()}

    def add(self, batch: TokenBatch) -> None:
        """The caller sees to it that the batch fits; only the first of a shard may be longer than the memory."""
        low, high = self.tokens, self.tokens + len(batch.visual)
        if high > self._capacity and not low:
            self._allocate(high)
        for layer, h in batch.activations.items():
            self._layers[layer][low:high] = h
        for name, place in self._places.items():
            place[low:high] = getattr(batch, name)
        self._numbers.append(batch.batch)
        self._bounds.append(high)

    def write(self, path: Path, label: Mapping[str, Any]) -> Shard:
        """Write the batches added since the last time. Raises StorageError; nothing is then at `path`."""
        tensors = {f"{_PREFIX}{layer:02d}": store[: self.tokens] for layer, store in self._layers.items()}
        tensors |= {name: store[: self.tokens] for name, store in self._places.items()}
        tensors |= {"batch": torch.tensor(self._numbers), "bounds": torch.tensor(self._bounds)}
        # one entry only: safetensors writes several in an order that changes from run to run
        files.write_tensors(path, tensors, {_LABEL: json.dumps(dict(label))})
        self._numbers, self._bounds = [], [0]
        return Shard.open(path, label)


@dataclass(frozen=True)
class Shard:
    """A whole shard on disk. `numbers` of its m batches, ascending; batch i is tokens bounds[i] to bounds[i + 1]."""

    path: Path
    numbers: list[int]
    bounds: list[int]
    layout: Layout
    size: int

    @classmethod
    def open(cls, path: Path, label: Mapping[str, Any]) -> Shard:
        """Check header, size and shapes, without reading the activations.

        Raises:
            FormatError: missing, damaged, or written under another label.
        """
        with _reading(path), safe_open(path, framework="pt") as file:
            if json.loads((file.metadata() or {}).get(_LABEL, "null")) != label:
                raise FormatError(f"a shard of another cache or place; {ADVICE}", path)
            numbers, bounds = file.get_tensor("batch").tolist(), file.get_tensor("bounds").tolist()
            layout, fits = {}, len(bounds) == len(numbers) + 1 and bounds[0] == 0 and len(numbers) > 0
            fits = fits and all(a < b for part in (numbers, bounds) for a, b in pairwise(part))
            for name in set(file.keys()) - {"batch", "bounds"}:
                # of a slice only so many tokens are touched: none
                empty = file.get_slice(name)[:0]
                shape = file.get_slice(name).get_shape()
                fits = fits and shape[0] == bounds[-1]
                if name in _PLACES:
                    fits = fits and len(shape) == 1 and empty.dtype == _PLACES[name]
                else:
                    fits = fits and len(shape) == 2
                    layout[int(name.removeprefix(_PREFIX))] = (shape[-1], empty.dtype)
            if not fits or not layout or not set(_PLACES) <= set(file.keys()):
                raise FormatError(f"tensors do not fit together; {ADVICE}", path)
            size = path.stat().st_size
        return cls(path, numbers, bounds, dict(sorted(layout.items())), size)

    @property
    def tokens(self) -> int:
        return self.bounds[-1]

    def entry(self) -> dict[str, Any]:
        """As JSON, for a list of shards."""
        first, last = self.numbers[0], self.numbers[-1]
        return {"file": self.path.name, "first": first, "last": last, "tokens": self.tokens, "bytes": self.size}

    def batches(self, start: int, device: torch.device) -> Iterator[TokenBatch]:
        """Those numbered `start` and up. On the CPU they are views of the mapped file; writing to them is private."""
        first = bisect_left(self.numbers, start)
        if first == len(self.numbers):
            return
        with _reading(self.path), safe_open(self.path, framework="pt") as file:
            layers = {layer: file.get_slice(f"{_PREFIX}{layer:02d}") for layer in self.layout}
            places = {name: file.get_slice(name) for name in _PLACES}
            for i in range(first, len(self.numbers)):
                part = slice(self.bounds[i], self.bounds[i + 1])
                yield TokenBatch(
                    activations={layer: rows[part].to(device) for layer, rows in layers.items()},
                    batch=self.numbers[i],
                    **{name: place[part].to(device) for name, place in places.items()},
                )


def moved(batch: TokenBatch, device: torch.device) -> TokenBatch:
    places: dict[str, Tensor] = {name: getattr(batch, name).to(device) for name in _PLACES}
    return TokenBatch({layer: h.to(device) for layer, h in batch.activations.items()}, batch=batch.batch, **places)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FormatError:
        raise
    except FileNotFoundError:
        raise FormatError(f"no such shard; {ADVICE}", path) from None
    except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
        raise FormatError(f"damaged, or not a shard ({error}); {ADVICE}", path) from None
