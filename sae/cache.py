"""Activations kept on disk: the backbone runs once, every further epoch and every further run reads.

A cache is a folder of its own. Token batch n is `batch_<n>.safetensors` with `layer_04` [N, d] and so on in the dtype
they came in, `visual` [N] bool, `rows` and `positions` [N] int64. `index.json` holds the key and, once the source has
ended, the numbers of all batches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sae import files
from sae.errors import ConfigError, FormatError
from sae.harvest import TokenBatch

FORMAT = 2
INDEX = "index.json"
_FIELDS = ("visual", "rows", "positions")


class ActivationCache:
    """A source of token batches that keeps on disk what another source gives.

    The first pass hands on the batches of `source` and writes them; it may be killed at any time, and the next one goes
    on after the last file. Later passes read, and give the same batches bit for bit, on the CPU.

    Args:
        folder: for this cache alone; made where it is missing.
        key: what the activations depend on, as JSON (model, layers, hashes of the data, window, sink factor, ...).
        source: gives the token batches from a batch number on, numbers ascending, the same ones each time.

    Raises:
        ConfigError: a folder of another key, naming the first field that differs.
        FormatError: a damaged index or batch. StorageError: (on iteration) the folder cannot be written.
    """

    def __init__(
        self, folder: str | Path, key: Mapping[str, Any], source: Callable[[int], Iterable[TokenBatch]]
    ) -> None:
        self.folder, self.source = Path(folder), source
        self.key: dict[str, Any] = json.loads(json.dumps(dict(key)))
        #: Numbers of all batches; None until the first pass has ended.
        self.numbers: list[int] | None = None
        if not (self.folder / INDEX).exists():
            return
        index = files.read_json(self.folder / INDEX)
        if index.get("format") != FORMAT or not isinstance(index.get("key"), dict):
            raise FormatError(f"not the index of a cache of format {FORMAT}; delete the folder", self.folder / INDEX)
        for field in {**self.key, **index["key"]}:
            there, asked = index["key"].get(field), self.key.get(field)
            if there != asked:
                raise ConfigError(f"cache {self.folder}: made with {field} = {there!r}, now asked for {asked!r}")
        self.numbers = index.get("numbers")

    def __call__(self, start: int = 0) -> Iterator[TokenBatch]:
        """The token batches from number `start` on. Missing ones before it are harvested and written as well."""
        if self.numbers is None:
            self._write_index()
            found = [int(path.stem.removeprefix("batch_")) for path in self.folder.glob("batch_*.safetensors")]
            numbers = sorted(found)
        else:
            numbers = self.numbers
        yield from (self._read(number) for number in numbers if number >= start)
        if self.numbers is not None:
            return
        for batch in self.source(numbers[-1] + 1 if numbers else 0):
            layers = {f"layer_{layer:02d}": h for layer, h in batch.activations.items()}
            fields = {name: getattr(batch, name) for name in _FIELDS}
            files.write_tensors(self._path(batch.batch), layers | fields)
            numbers.append(batch.batch)
            if batch.batch >= start:
                yield batch
        self.numbers = numbers
        self._write_index()

    def _read(self, number: int) -> TokenBatch:
        tensors = files.read_tensors(self._path(number))
        if missing := [name for name in _FIELDS if name not in tensors]:
            raise FormatError(f"has no tensor {missing[0]}; delete the folder", self._path(number))
        fields = {name: tensors.pop(name) for name in _FIELDS}
        layers = {int(name.removeprefix("layer_")): h for name, h in tensors.items()}
        return TokenBatch(dict(sorted(layers.items())), batch=number, **fields)

    def _path(self, number: int) -> Path:
        return self.folder / f"batch_{number:06d}.safetensors"

    def _write_index(self) -> None:
        files.write_json(self.folder / INDEX, {"format": FORMAT, "key": self.key, "numbers": self.numbers})
