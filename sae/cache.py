"""Activations kept on disk: the backbone runs once, every further epoch and every further run reads.

A cache is a folder of its own. `shard_000000.safetensors` and so on hold the token batches one after another, whole
batches only: `layer_04` [n, d] and so on in the dtype they came in, `visual` [n] bool, `rows` and `positions` [n]
int64, and for the m batches their numbers `batch` [m] and `bounds` [m + 1], batch i being the tokens from bounds[i] to
bounds[i + 1]. `index.json` holds the key and, once the source has ended, the list of shards.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sae import files
from sae.errors import ConfigError, FormatError, ShapeError, StorageError
from sae.harvest import TokenBatch
from sae.regular import check_regular

FORMAT = 1
INDEX = "index.json"
_SHARDS = "shard_*.safetensors"
_LABEL = "activation_cache"
_ADVICE = "delete this shard to harvest it and the ones after it again"
_FIELDS = ("visual", "rows", "positions")
_PREFIX = "layer_"


class ActivationCache:
    """A source of token batches that keeps on disk what another source gives.

    The first pass hands on the batches of `source` and writes them; it may be killed at any time and resumes after the
    last whole shard. Every further pass reads memory-mapped shards and gives the same batches bit for bit, on the CPU.
    Batches without tokens are left out. If a shard is deleted, the next pass harvests from there on again.

    One process writes at a time, until its iterator is closed or deleted; any number reads once the cache is complete.

    Args:
        folder: for this cache alone; made where it is missing.
        key: what the activations depend on, as JSON (model, layers, hashes of the data, window, sink factor, ...).
        source: gives the token batches from a batch number on, numbers ascending, the same ones each time.
        shard_tokens: tokens per shard at most (a longer batch gets a shard of its own), and held in memory.

    Raises:
        ConfigError: a folder of another key, naming the first field that differs; a key that is not JSON; (on
            iteration) a source that does not start where it should.
        FormatError, ShapeError: a damaged index or shard; batches of different layers, widths or dtypes.
        StorageError: (on iteration) the folder cannot be written, or is being written by another process.
    """

    def __init__(
        self,
        folder: str | Path,
        key: Mapping[str, Any],
        source: Callable[[int], Iterable[TokenBatch]],
        shard_tokens: int = 65_536,
    ) -> None:
        try:
            self.key: dict[str, Any] = json.loads(json.dumps(dict(key), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"key of the cache {folder}: cannot be written as JSON ({error})") from None
        self.folder, self.source, self.shard_tokens = Path(folder), source, shard_tokens
        self._index()

    @property
    def complete(self) -> bool:
        """Whether the source has been read to its end, and all shards are on disk."""
        index = self._index()
        return index is not None and index["complete"] and len(self._paths()) >= len(index["shards"])

    def __call__(self, start: int = 0) -> Iterator[TokenBatch]:
        """The token batches from number `start` on. Missing ones before it are harvested and written as well."""
        if not self.complete:
            with self._locked():
                # another process may have completed the cache since
                if not self.complete:
                    yield from self._first_pass(start)
                    return
        for shard in self._open_shards():
            yield from shard.batches(start)

    def _first_pass(self, start: int) -> Iterator[TokenBatch]:
        files.sweep(self.folder, _SHARDS)
        files.sweep(self.folder, INDEX)
        self._write_index(False)
        shards = self._open_shards()
        # what follows a deleted shard; the last one first, so that a kill leaves no gap
        for path in sorted(self.folder.glob(_SHARDS), reverse=True)[: -len(shards) or None]:
            with files.storage(path):
                path.unlink()
        for shard in shards:
            yield from shard.batches(start)
        following = shards[-1].numbers[-1] + 1 if shards else 0
        writer: _ShardWriter | None = None
        for batch in self.source(following):
            if batch.batch < following:
                problem = f"the source gave batch {batch.batch} where {following} or a later one was due"
                raise ConfigError(f"cache {self.folder}: {problem}; numbers must ascend from the one it is called with")
            following = batch.batch + 1
            if not len(batch.visual):
                continue
            if writer is None:
                writer = _ShardWriter(batch, self.shard_tokens)
            if writer.tokens and writer.tokens + len(batch.visual) > self.shard_tokens:
                shards.append(writer.write(self._path(len(shards)), self._label(len(shards))))
            writer.add(batch)
            if batch.batch >= start:
                fields = {name: getattr(batch, name).cpu() for name in _FIELDS}
                activations = {layer: h.cpu() for layer, h in batch.activations.items()}
                yield TokenBatch(activations, batch=batch.batch, **fields)
        if writer is not None:
            shards.append(writer.write(self._path(len(shards)), self._label(len(shards))))
        self._write_index(True, shards)

    def _write_index(self, complete: bool, shards: Iterable[_Shard] = ()) -> None:
        names = [{"file": shard.path.name, "tokens": shard.bounds[-1]} for shard in shards]
        index = {"format": FORMAT, "key": self.key, "complete": complete, "shards": names}
        files.write_json(self.folder / INDEX, index)

    def _index(self) -> dict[str, Any] | None:
        path = self.folder / INDEX
        if not path.is_file():
            return None
        index = files.read_json(path)
        kinds = {"key": dict, "complete": bool, "shards": list}
        if index.get("format") != FORMAT or not all(isinstance(index.get(k), kind) for k, kind in kinds.items()):
            raise FormatError(f"not the index of an activation cache of format {FORMAT}; delete the folder", path)
        stored = index["key"]
        for field in {**self.key, **stored}:
            if stored.get(field) != self.key.get(field):
                there, asked = (json.dumps(key.get(field), ensure_ascii=False)[:80] for key in (stored, self.key))
                raise ConfigError(f"cache {self.folder}: made with {field} = {there}, now asked for {asked}")
        # 10 and 10.0 are equal here, but differ in a digest
        self.key = stored
        return index

    def _open_shards(self) -> list[_Shard]:
        return [_Shard.open(path, self._label(number)) for number, path in enumerate(self._paths())]

    def _paths(self) -> list[Path]:
        """The shards on disk, up to the first missing one."""
        paths: list[Path] = []
        while (path := self._path(len(paths))).exists():
            paths.append(path)
        return paths

    def _path(self, number: int) -> Path:
        return self.folder / _SHARDS.replace("*", f"{number:06d}")

    def _label(self, number: int) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return {"format": FORMAT, "key": digest, "shard": number}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not on every system, and not needed for reading

        path = self.folder / ".lock"
        with files.storage(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with files.storage(path):
                try:
                    # flock, not lockf: it also keeps apart two passes of one process
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    message = "is being written by another process, or by a pass of this one that is still open"
                    raise StorageError(message, self.folder, error.errno) from None
            yield
        finally:
            os.close(handle)


class _ShardWriter:
    """Collects token batches like `first` for a shard, in memory that is reused from shard to shard."""

    def __init__(self, first: TokenBatch, capacity: int) -> None:
        self._numbers: list[int] = []
        self._bounds = [0]
        self._allocate(_tensors(first), capacity)

    @property
    def tokens(self) -> int:
        return self._bounds[-1]

    def _allocate(self, like: Mapping[str, Tensor], capacity: int) -> None:
        self._memory = {name: torch.empty(capacity, *t.shape[1:], dtype=t.dtype) for name, t in like.items()}

    def add(self, batch: TokenBatch) -> None:
        """Append a batch that fits; only the first of a shard may be longer than the capacity."""
        tensors, count = _tensors(batch), len(batch.visual)
        for name in self._memory | tensors:
            like, tensor = self._memory.get(name), tensors.get(name)
            if like is None or tensor is None or tensor.dtype != like.dtype or tensor.shape != (count, *like.shape[1:]):
                raise ShapeError(f"batch {batch.batch}: {name} is not as in the batches before it, for {count} tokens")
        low, high = self.tokens, self.tokens + count
        if not low and high > len(self._memory["rows"]):
            self._allocate(tensors, high)
        for name, tensor in tensors.items():
            self._memory[name][low:high] = tensor
        self._numbers.append(batch.batch)
        self._bounds.append(high)

    def write(self, path: Path, label: Mapping[str, Any]) -> _Shard:
        """Write the batches added since the last call. Raises StorageError; no file is then left at `path`."""
        tensors = {name: memory[: self.tokens] for name, memory in self._memory.items()}
        tensors |= {"batch": torch.tensor(self._numbers), "bounds": torch.tensor(self._bounds)}
        # one entry only: safetensors writes several in an order that changes from run to run
        files.write_tensors(path, tensors, {_LABEL: json.dumps(dict(label))})
        self._numbers, self._bounds = [], [0]
        return _Shard.open(path, label)


def _tensors(batch: TokenBatch) -> dict[str, Tensor]:
    """By their names in a shard."""
    layers = {f"{_PREFIX}{layer:02d}": h for layer, h in sorted(batch.activations.items())}
    return layers | {name: getattr(batch, name) for name in _FIELDS}


@dataclass(frozen=True)
class _Shard:
    """A shard on disk. `numbers` of its m batches, ascending; batch i is tokens bounds[i] to bounds[i + 1]."""

    path: Path
    numbers: list[int]
    bounds: list[int]

    @classmethod
    def open(cls, path: Path, label: Mapping[str, Any]) -> _Shard:
        """Open a shard without reading its activations. Raises FormatError if it is damaged or has another label."""
        with _reading(path), safe_open(path, framework="pt") as file:
            if json.loads((file.metadata() or {}).get(_LABEL, "null")) != label:
                raise FormatError(f"not the shard that belongs here; {_ADVICE}", path)
            return cls(path, file.get_tensor("batch").tolist(), file.get_tensor("bounds").tolist())

    def batches(self, start: int) -> Iterator[TokenBatch]:
        """The batches numbered `start` and up, as views of the mapped file; writing to them is private."""
        first = bisect_left(self.numbers, start)
        if first == len(self.numbers):
            return
        with _reading(self.path), safe_open(self.path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys() if name not in ("batch", "bounds")}  # noqa: SIM118
            for i in range(first, len(self.numbers)):
                part = {name: rows[self.bounds[i] : self.bounds[i + 1]] for name, rows in slices.items()}
                fields = {name: part.pop(name) for name in _FIELDS}
                layers = {int(name.removeprefix(_PREFIX)): h for name, h in part.items()}
                yield TokenBatch(dict(sorted(layers.items())), batch=self.numbers[i], **fields)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    check_regular(path)
    try:
        yield
    except (SafetensorError, OSError, ValueError, TypeError, LookupError) as error:
        raise FormatError(f"damaged, or not a shard ({error}); {_ADVICE}", path) from None
