"""The vectors of a bank's keys: full shards in files, the newest in the database; the nearest of them, exactly.

Rows are turned so that their leading directions come first, and coded in 8 bits in parts of a third. A question is
compared with the codes of the first part, a twelfth of the vectors' bytes: the rest of an inner product is at most the
product of the lengths left over (Cauchy-Schwarz). Where that leaves too many rows of a shard, its next part is read;
what is still left is compared as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from remind.core.errors import DataError
from remind.core.files import atomic_path, sha256_file
from remind.perception.scan import Scan, encode_rows, shortened

#: Vectors of a shard.
SHARD = 16_384
TABLES = """
CREATE TABLE tail (row INTEGER PRIMARY KEY, vector BLOB NOT NULL);
CREATE TABLE shards (number INTEGER PRIMARY KEY, sha256 TEXT NOT NULL);
"""
#: Parts of a row; the kernel of the product wants each to be a multiple of this.
_PARTS, _REGISTER = 3, 64
#: Of so many rows in a row the one with the best bound is looked at first, of several times as many as are wanted.
_STRIDE, _PROBED = 64, 8
#: Share of a shard's rows from which on it is faster to read the next part of all of them than to compare them.
_MANY = 1 / 64
#: Room for the rounding of float32 sums.
_ROUNDING = 1e-5
_BLOCK = 4096
_GROWTH = 4


@dataclass(frozen=True)
class _Part:
    """Codes of a part of unit rows, its lengths [n], and the lengths [n] of what the parts up to this one leave."""

    scan: Scan
    lengths: np.ndarray
    left: np.ndarray


@dataclass(frozen=True)
class _Shard:
    """A file of rows [SHARD, d], of which only the first part is kept in memory.

    Files are read and not mapped: systems map pages of 2 MB, so that a few rows would soon hold all of a file.

    Attributes:
        start: byte at which the rows begin.
        first: the first part.
    """

    path: Path
    dimension: int
    start: int
    first: _Part

    def take(self, places: np.ndarray) -> np.ndarray:
        """The rows at these places."""
        if len(places) > SHARD // 8:
            whole = np.fromfile(self.path, np.float32, SHARD * self.dimension, offset=self.start)
            return np.asarray(whole.reshape(SHARD, self.dimension)[places])
        size = 4 * self.dimension
        with self.path.open("rb", buffering=0) as file:
            rows = b"".join(os.pread(file.fileno(), size, self.start + size * place) for place in places.tolist())
        return np.frombuffer(rows, np.float32).reshape(len(places), self.dimension)

    def part(self, place: int) -> _Part:
        return self.first if place == 0 else _part(self.path, _spans(self.dimension)[place][0])


class _Bounds:
    """Upper bounds on the cosines of all rows with a vector, which become closer where that is needed.

    Attributes:
        upper: float32 [n].
    """

    def __init__(self, vectors: Vectors, vector: Tensor) -> None:
        self._shards = vectors.shards()
        newest = (vectors.newest(vector) + _ROUNDING).astype(np.float32)
        #: Bounds on the products with the parts read so far, and how many they are in each shard.
        self._sums = np.zeros(SHARD * len(self._shards), dtype=np.float32)
        self._read = [0] * len(self._shards)
        self.upper = np.concatenate([self._sums, newest])
        if self._shards:
            turned = vector / vector.norm().clamp_min(1e-12) @ vectors.directions()
            spans = _spans(len(vector))
            self._vector = [shortened(turned[first:end]) for first, end in spans]
            self._lengths = [np.float32(turned[first:end].norm()) for first, end in spans]
            self._left = [np.float32(turned[end:].norm()) for _, end in spans]
        for number in range(len(self._shards)):
            self._closer(number)

    def reaching(self, level: float) -> np.ndarray:
        """Numbers, ascending, of rows that include all with a cosine of at least `level`."""
        least = np.float32(level)
        while True:
            rows = np.flatnonzero(self.upper >= least)
            counts = np.bincount(rows // SHARD, minlength=len(self._read))[: len(self._read)]
            many = np.flatnonzero(counts > _MANY * SHARD).tolist()
            vague = [number for number in many if self._read[number] < len(self._vector)]
            if not vague or level == -np.inf:
                return rows
            for number in vague:
                self._closer(number)

    def _closer(self, number: int) -> None:
        """Read the next part of a shard."""
        place, here = self._read[number], slice(number * SHARD, (number + 1) * SHARD)
        part = self._shards[number].part(place)
        products = part.scan.bounds(*self._vector[place])
        products *= part.lengths
        products *= self._lengths[place]
        self._sums[here] += products
        np.multiply(part.left, self._left[place], out=self.upper[here])
        self.upper[here] += self._sums[here]
        self.upper[here] += np.float32(_ROUNDING)
        self._read[number] += 1


class Vectors:
    """Vectors numbered from 0 in the order they came. The caller owns the transactions.

    Args:
        folder: of the shards.
        db: has `TABLES`.
    """

    def __init__(self, folder: Path, db: sqlite3.Connection) -> None:
        self.folder, self._db = folder, db
        self._shards: dict[int, _Shard] = {}
        self.load()

    def load(self) -> None:
        """Read what the database has: when it is opened, and after a rollback."""
        self._shards.clear()
        self._turn: Tensor | None = None
        self._sealed: int = self._db.execute("SELECT count(*) FROM shards").fetchone()[0]
        blobs = [blob for (blob,) in self._db.execute("SELECT vector FROM tail ORDER BY row")]
        self._count = len(blobs)
        self._tail, self._norms = torch.empty(0, 0), torch.empty(SHARD)
        if blobs:
            rows = torch.frombuffer(bytearray(b"".join(blobs)), dtype=torch.float32).view(len(blobs), -1)
            # room for a shard: pages that are not written take no memory
            self._tail = torch.empty(SHARD, rows.shape[1])
            self._tail[: len(rows)] = rows
            self._norms[: len(rows)] = rows.norm(dim=-1)

    def sweep(self) -> None:
        """Remove files that no transaction names."""
        named = {_name(number) for (number,) in self._db.execute("SELECT number FROM shards")}
        for path in self.folder.glob("vectors-*.safetensors"):
            if path.name not in named:
                path.unlink()

    @property
    def dimension(self) -> int | None:
        """Length of a vector; None as long as there are none."""
        if self._tail.shape[1]:
            return self._tail.shape[1]
        return self._shard(0).dimension if self._sealed else None

    def __len__(self) -> int:
        return self._sealed * SHARD + self._count

    def append(self, vectors: Tensor, record: str) -> range:
        """Add rows [n, d] and return their numbers.

        Args:
            record: whose they are, for errors.

        Raises:
            DataError: another dimension than that of the bank, or a row that is zero or not finite.
        """
        rows, dimension = vectors.float().numpy(), self.dimension or vectors.shape[-1]
        if rows.shape[1] != dimension:
            raise DataError(f"a vector has {rows.shape[1]} numbers, not {dimension}", self.folder, record)
        lengths = np.einsum("nd,nd->n", rows, rows)
        if not (np.isfinite(lengths) & (lengths > 0)).all():
            raise DataError("a vector is zero or not finite", self.folder, record)
        first = number = len(self)
        while len(rows):
            part, rows = rows[: SHARD - self._count], rows[SHARD - self._count :]
            blobs = [(number + place, row.tobytes()) for place, row in enumerate(part)]
            self._db.executemany("INSERT INTO tail VALUES (?, ?)", blobs)
            if not self._tail.shape[1]:
                self._tail = torch.empty(SHARD, dimension)
            here = slice(self._count, self._count + len(part))
            self._tail.numpy()[here], self._norms.numpy()[here] = part, np.linalg.norm(part, axis=1)
            number, self._count = number + len(part), self._count + len(part)
            if self._count == SHARD:
                self._seal()
        return range(first, number)

    def take(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """The rows of these numbers [n, d]."""
        places = np.asarray(rows, dtype=np.int64)
        found = np.empty((len(places), self.dimension or 0), dtype=np.float32)
        shards = places // SHARD
        for shard in np.unique(shards).tolist():
            here = np.flatnonzero(shards == shard)
            inside = places[here] % SHARD
            found[here] = self._tail.numpy()[inside] if shard == self._sealed else self._shard(shard).take(inside)
        return torch.from_numpy(found)

    def nearest(self, vector: Tensor, first: int) -> Iterator[list[tuple[int, float]]]:
        """All rows as (number, cosine with the vector [d]) by falling cosine (ties: earlier first), in stretches.

        Args:
            first: at least so many make the first stretch; the next ones are longer.
        """
        if not len(self):
            return
        bounds = _Bounds(self, vector)
        upper = bounds.upper
        peaks = np.maximum.reduceat(upper, np.arange(0, len(upper), _STRIDE))
        wanted, above, level = max(1, first), np.inf, 0.0
        while level > -np.inf:
            level, probed = -np.inf, _PROBED * wanted
            if probed < len(peaks):
                # some rows of high bounds: at least the wanted number reaches what the best of them do
                blocks = np.argpartition(peaks, -probed)[-probed:]
                places = np.minimum(blocks[:, None] * _STRIDE + np.arange(_STRIDE), len(upper) - 1)
                seeds = places[np.arange(probed), upper[places].argmax(axis=1)]
                level = float(np.sort(self._cosines(seeds, vector))[-wanted])
            rows = bounds.reaching(level)
            values = self._cosines(rows, vector)
            ready = np.flatnonzero((values >= level) & (values < above))
            if len(ready):
                ready = ready[np.lexsort((rows[ready], -values[ready]))]
                yield list(zip(rows[ready].tolist(), values[ready].tolist(), strict=True))
            above, wanted = level, _GROWTH * wanted

    def shards(self) -> list[_Shard]:
        """Those in files."""
        return [self._shard(number) for number in range(self._sealed)]

    def directions(self) -> Tensor:
        """Orthonormal columns [d, d] that the rows of all shards are turned to; those of the first shard."""
        if self._turn is None:
            self._turn = _tensors(self._shard(0).path, "directions")["directions"]
        return self._turn

    def newest(self, vector: Tensor) -> np.ndarray:
        """Cosines of the rows that are in no file."""
        if not self._count:
            # a bank that was opened with full shards alone has no tail, of whatever dimension
            return np.zeros(0)
        return Scan(self._tail[: self._count], {"norms": self._norms[: self._count]}).exact(vector)

    # inside

    def _cosines(self, rows: np.ndarray, vector: Tensor) -> np.ndarray:
        """In float64 and each row by itself: the same whichever others are asked for, and wherever it is stored."""
        asked = vector.double().numpy()
        parts = [np.zeros(0)]
        for start in range(0, len(rows), _BLOCK):
            part = self.take(rows[start : start + _BLOCK]).double().numpy()
            lengths = np.sqrt((part * part).sum(axis=1) * (asked * asked).sum())
            parts.append((part * asked).sum(axis=1) / np.maximum(lengths, 1e-12))
        return np.concatenate(parts)

    def _seal(self) -> None:
        """Move a full tail from the database into a file, which is there before the transaction that names it ends."""
        rows, number = self._tail, self._sealed
        content = _file(rows, self.directions() if number else _directions(rows), first=not number)
        with atomic_path(self.folder / _name(number)) as path:
            path.write_bytes(content)
        self._db.execute("INSERT INTO shards VALUES (?, ?)", (number, hashlib.sha256(content).hexdigest()))
        self._db.execute("DELETE FROM tail")
        self._sealed, self._count = number + 1, 0

    def _shard(self, number: int) -> _Shard:
        if number not in self._shards:
            from safetensors import SafetensorError

            path = self.folder / _name(number)
            (expected,) = self._db.execute("SELECT sha256 FROM shards WHERE number = ?", (number,)).fetchone()
            try:
                if sha256_file(path) != expected:
                    what = "its content has changed since it was written; delete the bank's folder to rebuild it"
                    raise DataError(what, path)
                with path.open("rb") as file:
                    length = int.from_bytes(file.read(8), "little")
                    rows = json.loads(file.read(length))["vectors"]
                self._shards[number] = _Shard(
                    path, rows["shape"][1], 8 + length + rows["data_offsets"][0], _part(path, 0)
                )
            except (OSError, SafetensorError) as error:
                raise DataError(f"cannot be read: {error}", path) from None
        return self._shards[number]


def _name(number: int) -> str:
    return f"vectors-{number}.safetensors"


def _spans(dimension: int) -> list[tuple[int, int]]:
    """First and last + 1 of the directions of every part."""
    width = -(-dimension // (_PARTS * _REGISTER)) * _REGISTER
    return [(first, min(first + width, dimension)) for first in range(0, dimension, width)]


def _directions(rows: Tensor) -> Tensor:
    """Orthonormal columns [d, d], those first that hold most of the rows' squared length."""
    unit = torch.nn.functional.normalize(rows, dim=-1)
    _, directions = torch.linalg.eigh((unit.T @ unit).double())
    return directions.flip(1).float().contiguous()


def _file(rows: Tensor, directions: Tensor, first: bool) -> bytes:
    """A shard as a safetensors file; the first one holds the directions."""
    from safetensors.torch import save

    turned = torch.nn.functional.normalize(rows.double(), dim=-1) @ directions.double()
    tensors = {"vectors": rows} | ({"directions": directions} if first else {})
    for start, end in _spans(rows.shape[1]):
        own = {**encode_rows(turned[:, start:end].float()), "left": turned[:, end:].norm(dim=-1).float()}
        tensors |= {f"{start}.{name}": tensor for name, tensor in own.items()}
    return save(tensors)


def _tensors(path: Path, *names: str) -> dict[str, Tensor]:
    """Copies of a file's tensors."""
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        return {name: file.get_tensor(name).clone() for name in names}


def _part(path: Path, start: int) -> _Part:
    """The part of a shard that begins with this direction."""
    names = ("codes", "scales", "errors", "norms", "left")
    found = _tensors(path, *(f"{start}.{name}" for name in names))
    own = {name: found[f"{start}.{name}"] for name in names}
    # a scan without rows gives bounds alone
    return _Part(Scan(torch.empty(0), own), own["norms"].numpy(), own["left"].numpy())
