"""What comes back from disk is what the source gave, whatever happened on the way.

Run as a script, this file is the process that a test kills.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sae import ConfigError, FormatError, SAEError, ShapeError, StorageError, files
from sae.cache import ActivationCache
from sae.harvest import TokenBatch

KEY = {"model": "tiny", "layers": [4, 12], "data": {"sha256": "ab", "window": 512}, "sink_factor": 1.0}
SIZES = [5, 0, 7, 3, 0, 0, 9, 4, 6, 2, 8, 1]


def token_batch(number: int, size: int) -> TokenBatch:
    """Two layers of different width and dtype; every bit depends on the number of the batch."""
    generator = torch.Generator().manual_seed(number)
    return TokenBatch(
        activations={
            12: torch.randn(size, 3, generator=generator, dtype=torch.float64),
            4: torch.randn(size, 6, generator=generator).bfloat16(),
        },
        visual=torch.rand(size, generator=generator) < 0.3,
        rows=torch.randint(0, 9, (size,), generator=generator),
        positions=torch.randint(0, 2**40, (size,), generator=generator),
        batch=number,
    )


class Source:
    """Batches of these sizes; notes where it was started."""

    def __init__(self, sizes: list[int] = SIZES) -> None:
        self.sizes = sizes
        self.starts: list[int] = []

    def __call__(self, start: int) -> Iterator[TokenBatch]:
        self.starts.append(start)
        for number, size in enumerate(self.sizes):
            if number >= start:
                yield token_batch(number, size)


def raws(batches: Iterable[TokenBatch]) -> list[tuple[Any, ...]]:
    """Every bit of each batch."""
    result = []
    for batch in batches:
        parts = [(str(k), v) for k, v in sorted(batch.activations.items())]
        parts += [(name, getattr(batch, name)) for name in ("visual", "rows", "positions")]
        bits = [(n, t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes()) for n, t in parts]
        result.append((batch.batch, bits))
    return result


def expected(start: int = 0, sizes: list[int] = SIZES) -> list[tuple[Any, ...]]:
    return raws(token_batch(number, size) for number, size in enumerate(sizes) if number >= start and size)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("shard_*"))


def no_source(start: int) -> Iterator[TokenBatch]:
    raise AssertionError(f"called from batch {start} on")


def filled(folder: Path, shard_tokens: int = 10, sizes: list[int] = SIZES) -> ActivationCache:
    cache = ActivationCache(folder, KEY, Source(sizes), shard_tokens)
    for batch in cache(0):
        # what a reader does to its batch stays with it
        batch.activations[4].zero_()
        batch.rows.fill_(7)
    return cache


def one_line(error: BaseException, *parts: object) -> None:
    assert isinstance(error, SAEError)
    assert "\n" not in str(error)
    assert all(str(part) in str(error) for part in parts)


def test_what_is_on_disk(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path, KEY, Source([*SIZES, 25]), 10)
    assert not cache.complete
    list(cache(0))
    assert cache.complete
    # at most ten tokens, or one longer batch: 5 | 7 3 | 9 | 4 6 | 2 8 | 1 | 25
    tokens, groups = (5, 10, 9, 10, 10, 1, 25), [[0], [2, 3], [6], [7, 8], [9, 10], [11], [12]]
    assert shards(tmp_path) == [f"shard_{number:06d}.safetensors" for number in range(7)]
    for name, group, count in zip(shards(tmp_path), groups, tokens, strict=True):
        tensors = load_file(tmp_path / name)
        assert set(tensors) == {"layer_04", "layer_12", "visual", "rows", "positions", "batch", "bounds"}
        assert tensors["batch"].tolist() == group
        assert len(tensors["layer_04"]) == tensors["bounds"][-1] == count
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["format"], index["key"], index["complete"]) == (1, KEY, True)
    assert [entry["tokens"] for entry in index["shards"]] == list(tokens)
    assert {path.name for path in tmp_path.iterdir()} == {*shards(tmp_path), "index.json", ".lock"}


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=10),
    shard_tokens=st.integers(1, 25),
    stops=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3),
    start=st.integers(0, 12),
)
def test_abandoned_passes_are_continued(tmp_path_factory, sizes, shard_tokens, stops, start) -> None:
    folder, whole = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    filled(whole, shard_tokens, sizes)
    for begin, stop in stops:
        run = ActivationCache(folder, KEY, Source(sizes), shard_tokens)(begin)
        assert raws(islice(run, stop)) == expected(begin, sizes)[:stop]
        run.close()  # type: ignore[attr-defined]
    cache = ActivationCache(folder, KEY, Source(sizes), shard_tokens)
    assert raws(cache(start)) == expected(start, sizes)
    assert contents(folder) == contents(whole)
    for begin in (0, start):
        assert raws(ActivationCache(whole, KEY, no_source)(begin)) == expected(begin, sizes)


def test_harvesting_resumes_after_the_last_whole_shard(tmp_path: Path) -> None:
    run = ActivationCache(tmp_path, KEY, Source(), 10)(0)
    list(islice(run, 5))  # batches 0 2 3 6 7: shards [0] [2 3] [6] are whole
    del run
    with pytest.raises(ConfigError, match="the source gave batch 0 where 7 or a later one was due") as caught:
        list(ActivationCache(tmp_path, KEY, lambda start: Source()(0), 10)(0))
    one_line(caught.value, tmp_path)
    source = Source()
    cache = ActivationCache(tmp_path, KEY, source, 10)
    # what is missing before the start is harvested, but not given
    assert raws(cache(9)) == expected(9)
    assert source.starts == [7]
    assert raws(cache(0)) == expected()


def test_killed_at_several_points(tmp_path: Path) -> None:
    """One folder, killed in the source, in the middle of a shard, and before the index."""
    filled(tmp_path / "whole")
    folder = tmp_path / "cut"
    before: dict[str, bytes] = {}
    for point, whole in (("source:3", 1), ("shard:2", 2), ("index", 6)):
        child = Forked(Path(__file__), folder, point)
        errors = child.communicate()[1]
        assert child.returncode == -signal.SIGKILL, errors
        assert shards(folder) == shards(tmp_path / "whole")[:whole]
        assert all((folder / name).read_bytes() == data for name, data in before.items())
        before = {name: (folder / name).read_bytes() for name in shards(folder)}
        assert not ActivationCache(folder, KEY, no_source).complete
        # left by the kill, and gone with the next pass
        assert any(path.suffix == ".tmp" for path in folder.iterdir()) == point.startswith("shard")
    source = Source()
    assert raws(ActivationCache(folder, KEY, source, 10)(0)) == expected()
    assert source.starts == [12]
    assert contents(folder) == contents(tmp_path / "whole")


def test_one_writer_at_a_time_and_readers_need_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ActivationCache(tmp_path, KEY, Source(), 10)(0)
    next(first)
    with pytest.raises(StorageError) as caught:
        next(ActivationCache(tmp_path, KEY, no_source)(0))
    one_line(caught.value, tmp_path, "is being written by another process")
    late = ActivationCache(tmp_path, KEY, no_source, 10)
    lock = late._locked

    def after_the_other() -> Any:
        list(first)
        return lock()

    monkeypatch.setattr(late, "_locked", after_the_other)
    assert raws(late(0)) == expected()
    with (tmp_path / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert raws(ActivationCache(tmp_path, KEY, no_source)(0)) == expected()


def test_keys(tmp_path: Path) -> None:
    filled(tmp_path)
    for change, message in (
        ({"model": "large"}, 'model = "tiny", now asked for "large"'),
        ({"data": {"sha256": "ab"}}, r'data = .*"window": 512}, now asked for {"sha256": "ab"}'),
        ({"seed": 1}, "seed = null, now asked for 1"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            ActivationCache(tmp_path, {**KEY, **change}, no_source)
        one_line(caught.value, tmp_path)
    same = {**dict(reversed(list(KEY.items()))), "layers": (4, 12), "sink_factor": 1}
    assert raws(ActivationCache(tmp_path, same, no_source)(0)) == expected()
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        ActivationCache(tmp_path, {"model": object()}, no_source)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("changes", [{"format": 2}, {"shards": None}, {"complete": "yes"}])
def test_another_version_or_no_index(tmp_path: Path, changes: dict[str, Any]) -> None:
    filled(tmp_path)
    edit(tmp_path / "index.json", **changes)
    with pytest.raises(FormatError, match=r"index\.json: not the index of an activation cache of format 1"):
        ActivationCache(tmp_path, KEY, no_source)
    (tmp_path / "index.json").unlink()
    source = Source()
    assert raws(ActivationCache(tmp_path, KEY, source, 10)(0)) == expected()
    assert source.starts == [12]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def swap(path: Path) -> None:
    shutil.copy(path.parent / "shard_000000.safetensors", path)


def foreign(path: Path) -> None:
    """The same shard of a cache with another key."""
    other = ActivationCache(path.parent.parent / "other", {**KEY, "model": "other"}, Source(), 10)
    list(other(0))
    shutil.copy(other.folder / path.name, path)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("damage", [truncate, swap, foreign])
def test_damage_is_named_and_a_deleted_shard_is_harvested_again(tmp_path, damage, complete) -> None:
    filled(tmp_path / "whole")
    folder = tmp_path / "cache"
    shutil.copytree(tmp_path / "whole", folder)
    if not complete:
        edit(folder / "index.json", complete=False, shards=[])
    path = folder / shards(folder)[3]
    damage(path)
    with pytest.raises(FormatError) as caught:
        list(ActivationCache(folder, KEY, Source(), 10)(0))
    one_line(caught.value, "delete this shard")
    assert caught.value.path == path
    path.unlink()
    source = Source()
    cache = ActivationCache(folder, KEY, source, 10)
    assert not cache.complete
    assert raws(cache(0)) == expected()
    assert source.starts == [7]
    assert contents(folder) == contents(tmp_path / "whole")


def test_batches_that_do_not_fit_together(tmp_path: Path) -> None:
    good, other = token_batch(0, 4), token_batch(1, 4)
    layers = other.activations
    wrong = [({**layers, 4: h}, other.rows) for h in (layers[4].float(), layers[4][:, :2], layers[4][:1])]
    wrong += [({4: layers[4]}, other.rows), ({}, other.rows), (layers, other.rows[:1])]
    for number, (activations, rows) in enumerate(wrong):
        batches = [good, TokenBatch(activations, other.visual, rows, other.positions, 1)]
        with pytest.raises(ShapeError, match="batch 1"):
            list(ActivationCache(tmp_path / str(number), KEY, lambda start, batches=batches: iter(batches))(0))


def test_a_write_that_the_system_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if "shard_000002" in path.name:
            raise OSError(errno.ENOSPC, "no space")
        save_file(tensors, path, metadata=metadata)

    save_file = files.save_file
    batches = []
    with monkeypatch.context() as patch, pytest.raises(StorageError) as caught:
        patch.setattr(files, "save_file", full)
        for batch in ActivationCache(tmp_path / "cut", KEY, Source(), 10)(0):
            batches.append(batch.batch)
    one_line(caught.value, tmp_path / "cut" / "shard_000002.safetensors", "No space left", "choose another folder")
    assert batches == [0, 2, 3, 6]
    filled(tmp_path / "whole")
    assert set(contents(tmp_path / "cut")) == {".lock", "index.json", *shards(tmp_path / "whole")[:2]}
    source = Source()
    assert raws(ActivationCache(tmp_path / "cut", KEY, source, 10)(0)) == expected()
    assert source.starts == [4]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_flat(tmp_path: Path) -> None:
    """Ten shards of 16 MB: writing takes little more than one of them, reading next to nothing."""
    width, tokens, per_shard, count = 512, 512, 32, 320
    template, places = torch.randn(tokens, width).bfloat16(), torch.arange(tokens)

    def source(start: int) -> Iterator[TokenBatch]:
        for number in range(start, count):
            yield TokenBatch({4: template + number}, places % 2 == 0, places, places, number)

    def anonymous() -> float:
        """Megabytes of this process, without what mapped files can give back."""
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) / 1024  # type: ignore

    list(ActivationCache(tmp_path / "warm", KEY, lambda start: islice(source(start), 2))(0))
    for make, most in ((source, 2.5), (no_source, 0.6)):
        base, peak = anonymous(), 0.0
        for batch in ActivationCache(tmp_path / "cache", KEY, make, tokens * per_shard)(0):
            float(batch.activations[4].sum())
            peak = max(peak, anonymous() - base)
        assert peak < most * 16
    assert len(shards(tmp_path / "cache")) == count / per_shard


def write(folder: Path, point: str) -> None:
    """Fill the cache and be killed: in the source, in a shard, or before the index."""
    kind, _, number = point.partition(":")

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def source(start: int) -> Iterator[TokenBatch]:
        for batch in Source()(start):
            if kind == "source" and batch.batch == int(number):
                die()
            yield batch

    save_file, write_json = files.save_file, files.write_json

    def half_saved(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata=metadata)
        if f"shard_{int(number):06d}" in path.name:
            os.truncate(path, path.stat().st_size // 2)
            (path.parent / ".tmp4fQ2x").write_bytes(b"left by the library")
            die()

    if kind == "shard":
        files.save_file = half_saved
    if kind == "index":
        files.write_json = lambda path, value: die() if value["complete"] else write_json(path, value)
    list(ActivationCache(folder, KEY, source, 10)(0))


if __name__ == "__main__":
    torch.set_num_threads(1)
    write(Path(sys.argv[1]), sys.argv[2])
