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
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from sae import files
from sae.errors import ConfigError, FormatError, StorageError
from sae.harvest import TokenBatch
from sae.shards import ADVICE, Layout, Shard, ShardWriter, layout_of, moved, token_bytes

FORMAT = 1
INDEX = "index.json"
LOCK = ".lock"
_SHARDS = "shard_*.safetensors"


def bytes_needed(tokens: int, layers: Collection[int], d: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes on disk of a cache of `tokens` tokens of width d; headers, some kB per shard, not counted."""
    return tokens * token_bytes(dict.fromkeys(layers, (d, dtype)))


class ActivationCache:
    """A source of token batches that keeps on disk what another source gives.

    The first pass hands on the batches of `source` and writes them; it may be killed at any time and goes on after the
    last whole shard, in another process, too. Every further pass reads memory-mapped shards, never calls `source`, and
    gives the same batches bit for bit. Batches without tokens are left out.

    One process writes at a time, any number reads once the cache is complete. Data-parallel processes need a folder
    each. A pass that is given up half-way holds the folder until its iterator is closed or deleted.

    Args:
        folder: for this cache alone; made where it is missing.
        key: what the activations depend on, as JSON (model, layers, hashes of the data, window, sink factor, ...).
        source: gives the token batches from a batch number on, numbers ascending, the same ones each time.
        shard_tokens: tokens per shard at most (a longer batch gets a shard of its own). So many tokens of all layers
            are held in memory during the first pass; a kill costs the harvest of as many at most.
        expected_tokens: how many the source will give, to see before writing whether they fit on the disk.
        device: where the batches given go.

    Raises:
        ConfigError: a folder that holds activations of another key, naming the first field that differs; a key that
            is not JSON; (on iteration) a source that does not start where it is told to.
        FormatError: a folder of another version or with a damaged index; (on iteration) a shard damaged or missing.
        ShapeError: (on iteration) batches that do not fit together.
        StorageError: (on iteration) the folder cannot be written, is too small, or is being written by another
            process. What is already on disk stays usable.
    """

    def __init__(
        self,
        folder: str | Path,
        key: Mapping[str, Any],
        source: Callable[[int], Iterable[TokenBatch]],
        shard_tokens: int = 65_536,
        *,
        expected_tokens: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if shard_tokens < 1:
            raise ConfigError(f"shard_tokens = {shard_tokens}: must be at least 1")
        try:
            self.key: dict[str, Any] = json.loads(json.dumps(dict(key), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"key of the cache {folder}: cannot be written as JSON ({error})") from None
        self.folder, self.source, self.device = Path(folder), source, torch.device(device)
        self.shard_tokens, self.expected_tokens = shard_tokens, expected_tokens
        self._index()

    @property
    def complete(self) -> bool:
        """Whether the source has been read to its end."""
        index = self._index()
        return index is not None and index["complete"]

    def __call__(self, start: int = 0) -> Iterator[TokenBatch]:
        """The token batches from number `start` on. What is missing before it is harvested and written as well."""
        if not self.complete:
            with self._locked():
                # whoever held the lock may have completed the cache since
                if not self.complete:
                    yield from self._first_pass(start)
                    return
        for shard in list(self._shards()):
            yield from shard.batches(start, self.device)

    def repair(self) -> int:
        """Delete the first damaged or missing shard and all after it; the next pass harvests them again.

        Returns:
            How many shards are left.
        """
        kept = 0
        with self._locked():
            with suppress(FormatError):
                for _ in self._shards():
                    kept += 1
            found = sorted(self.folder.glob(_SHARDS))
            index = self._index()
            if index is not None and index["complete"] and kept < len(index["shards"]):
                self._write_index()
            # the last one first, so that a kill leaves no gap
            for path in reversed(found):
                if path >= self._path(kept):
                    with files.storage(path):
                        path.unlink()
        return kept

    def _first_pass(self, start: int) -> Iterator[TokenBatch]:
        files.sweep(self.folder, _SHARDS)
        files.sweep(self.folder, INDEX)
        if self._index() is None:
            self._write_index()
        shards = list(self._shards())
        for shard in shards:
            yield from shard.batches(start, self.device)
        following = shards[-1].numbers[-1] + 1 if shards else 0
        layout = shards[-1].layout if shards else None
        waiting: ShardWriter | None = None
        for batch in self.source(following):
            if batch.batch < following:
                raise ConfigError(
                    f"cache {self.folder}: the source gave batch {batch.batch} where {following} or a later one was "
                    "due; it must start at the number it is called with, and numbers must ascend"
                )
            following = batch.batch + 1
            layout = layout_of(batch, layout)
            if not len(batch.visual):
                continue
            if waiting is None:
                self._check_space(layout, sum(shard.tokens for shard in shards))
                waiting = ShardWriter(layout, self.shard_tokens)
            if waiting.tokens and waiting.tokens + len(batch.visual) > self.shard_tokens:
                shards.append(waiting.write(self._path(len(shards)), self._label(len(shards))))
            waiting.add(batch)
            if batch.batch >= start:
                yield moved(batch, self.device)
        if waiting is not None:
            shards.append(waiting.write(self._path(len(shards)), self._label(len(shards))))
        self._write_index(shards)

    def _write_index(self, shards: list[Shard] | None = None) -> None:
        entries = None if shards is None else [shard.entry() for shard in shards]
        index = {"format": FORMAT, "key": self.key, "complete": entries is not None, "shards": entries or []}
        files.write_json(self.folder / INDEX, index)

    def _index(self) -> dict[str, Any] | None:
        path = self.folder / INDEX
        with files.storage(path):
            missing = not path.is_file()
        if missing:
            if any(self.folder.glob(_SHARDS)):
                raise FormatError("no such file, but there are shards; delete the folder to harvest again", path)
            return None
        index = files.read_json(path)
        known = {"key": dict, "complete": bool, "shards": list}
        if index.get("format") != FORMAT or not all(isinstance(index.get(k), kind) for k, kind in known.items()):
            raise FormatError(
                f"not the index of an activation cache of format {FORMAT}; choose another folder or delete this one",
                path,
            )
        if difference := _difference(index["key"], self.key):
            field, there, here = difference
            raise ConfigError(
                f"cache {self.folder}: made with {field} = {there}, now asked for {here}; choose another folder or "
                "delete this one"
            )
        # 10 and 10.0 are the same to us, but not to a digest
        self.key = index["key"]
        return index

    def _shards(self) -> Iterator[Shard]:
        """The shards on disk, checked by their headers."""
        index = self._index()
        listed: list[Any] | None = index["shards"] if index is not None and index["complete"] else None
        count = len(list(self.folder.glob(_SHARDS))) if listed is None else len(listed)
        before: Shard | None = None
        for number in range(count):
            path = self._path(number)
            shard = Shard.open(path, self._label(number))
            fits = before is None or (shard.layout == before.layout and shard.numbers[0] > before.numbers[-1])
            if not fits or (listed is not None and shard.entry() != listed[number]):
                raise FormatError(f"not the shard that was written here; {ADVICE}", path)
            yield shard
            before = shard

    def _path(self, number: int) -> Path:
        return self.folder / _SHARDS.replace("*", f"{number:06d}")

    def _label(self, number: int) -> dict[str, Any]:
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        return {"format": FORMAT, "key": digest, "shard": number}

    @contextmanager
    def _locked(self) -> Iterator[None]:
        import fcntl  # not on every system, and reading does without

        path = self.folder / LOCK
        with files.storage(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with files.storage(path):
                try:
                    # flock, not lockf: it also keeps apart two passes of one process
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise StorageError(
                        "is being written by another process, or by a pass of this one that is still open; wait for "
                        "its end or choose another folder",
                        self.folder,
                        error.errno,
                    ) from None
            yield
        finally:
            os.close(handle)

    def _check_space(self, layout: Layout, have: int) -> None:
        if self.expected_tokens is None:
            return
        needed = max(self.expected_tokens - have, 0) * token_bytes(layout)
        with files.storage(self.folder):
            free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise StorageError(
                f"{needed / 1e9:.1f} GB are needed for {self.expected_tokens} tokens, {free / 1e9:.1f} GB are free; "
                "free some space, choose another folder, or cache fewer tokens or layers",
                self.folder,
            )


def _difference(there: Any, here: Any, name: str = "") -> tuple[str, str, str] | None:
    """The first field in which two JSON values differ, and what it is in either."""
    if isinstance(there, dict) and isinstance(here, dict):
        for field in [*here, *(field for field in there if field not in here)]:
            inner = f"{name}.{field}" if name else field
            found = _difference(there.get(field, _ABSENT), here.get(field, _ABSENT), inner)
            if found:
                return found
        return None
    if there == here and isinstance(there, bool) == isinstance(here, bool):
        return None
    return name, _shown(there), _shown(here)


_ABSENT = object()


def _shown(value: Any) -> str:
    text = "nothing" if value is _ABSENT else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
