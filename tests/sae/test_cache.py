"""What comes back from disk is what the source gave, whatever happened on the way.

Run as a script, this file is the process that a test kills, limits or measures.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import Forked
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from sae import ConfigError, FormatError, SAEError, ShapeError, files
from sae.cache import ActivationCache
from sae.errors import StorageError
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
    """Batches of these sizes, those of size 0 absent; notes where it was started and how far it was read."""

    def __init__(self, sizes: list[int] = SIZES) -> None:
        self.sizes = sizes
        self.starts: list[int] = []
        self.read: list[int] = []

    def __call__(self, start: int) -> Iterator[TokenBatch]:
        self.starts.append(start)
        for number, size in enumerate(self.sizes):
            if number >= start and size:
                self.read.append(number)
                yield token_batch(number, size)


def raw(batch: TokenBatch) -> tuple[Any, ...]:
    """Every bit of a batch."""
    parts = [(str(k), v) for k, v in sorted(batch.activations.items())]
    parts += [(name, getattr(batch, name)) for name in ("visual", "rows", "positions")]
    return (
        batch.batch,
        [(n, t.dtype, tuple(t.shape), t.contiguous().view(torch.uint8).numpy().tobytes()) for n, t in parts],
    )


def raws(batches: Iterable[TokenBatch]) -> list[tuple[Any, ...]]:
    return [raw(batch) for batch in batches]


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
    assert len(list(cache(0))) == sum(map(bool, sizes))
    return cache


def one_line(error: BaseException, *parts: object) -> None:
    assert isinstance(error, SAEError)
    assert "\n" not in str(error)
    for part in parts:
        assert str(part) in str(error)


# --- first pass and later ones


@pytest.mark.parametrize("shard_tokens", [1, 10, 1000])
def test_the_first_pass_writes_and_later_ones_read(tmp_path: Path, shard_tokens: int) -> None:
    source = Source()
    cache = ActivationCache(tmp_path / "cache", KEY, source, shard_tokens)
    assert not cache.complete
    assert raws(cache(0)) == expected()
    assert cache.complete
    assert source.starts == [0]
    again = ActivationCache(tmp_path / "cache", KEY, no_source)
    for start in (0, 1, 4, 6, 11, 12, 99):
        assert raws(again(start)) == expected(start)


def test_what_is_on_disk(tmp_path: Path) -> None:
    filled(tmp_path)
    # at most ten tokens, whole batches only: 5 | 7 3 | 9 | 4 6 | 2 8 | 1
    assert shards(tmp_path) == [f"shard_{number:06d}.safetensors" for number in range(6)]
    groups = [[0], [2, 3], [6], [7, 8], [9, 10], [11]]
    for name, group in zip(shards(tmp_path), groups, strict=True):
        found = load_file(tmp_path / name)
        batches = [token_batch(number, SIZES[number]) for number in group]
        for layer in (4, 12):
            assert torch.equal(found[f"layer_{layer:02d}"], torch.cat([b.activations[layer] for b in batches]))
        for field in ("visual", "rows", "positions"):
            assert torch.equal(found[field], torch.cat([getattr(b, field) for b in batches]))
        assert found["batch"].tolist() == group
        assert found["bounds"].diff().tolist() == [SIZES[number] for number in group]
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["format"], index["key"], index["complete"]) == (1, KEY, True)
    assert [(entry["file"], entry["tokens"]) for entry in index["shards"]] == list(
        zip(shards(tmp_path), (5, 10, 9, 10, 10, 1), strict=True)
    )
    assert {path.name for path in tmp_path.iterdir()} == {*shards(tmp_path), "index.json", ".lock"}


def test_a_batch_longer_than_a_shard_gets_one_of_its_own(tmp_path: Path) -> None:
    sizes = [3, 25, 4, 5, 30]
    cache = filled(tmp_path, 10, sizes)
    assert [len(load_file(tmp_path / name)["rows"]) for name in shards(tmp_path)] == [3, 25, 9, 30]
    assert raws(cache(0)) == expected(0, sizes)


def test_an_empty_source_and_empty_batches(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path / "none", KEY, Source([]))
    assert list(cache(0)) == []
    assert cache.complete
    assert list(cache(0)) == []
    some = ActivationCache(tmp_path / "some", KEY, lambda start: iter([token_batch(0, 0), token_batch(3, 2)]))
    assert raws(some(0)) == raws(some(0)) == expected(0, [0, 0, 0, 2])


def test_what_a_reader_does_to_its_batch_stays_with_it(tmp_path: Path) -> None:
    cache = ActivationCache(tmp_path, KEY, Source(), 10)
    for _ in range(2):
        for batch in cache(0):
            for h in batch.activations.values():
                h.zero_()
            batch.rows.fill_(7)
    assert raws(cache(0)) == expected()


# --- interrupted passes


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), max_size=10),
    shard_tokens=st.integers(1, 25),
    stops=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=3),
    start=st.integers(0, 12),
)
def test_given_up_and_taken_up_again(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    shard_tokens: int,
    stops: list[tuple[int, int]],
    start: int,
) -> None:
    folder, whole = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    filled(whole, shard_tokens, sizes)
    for begin, stop in stops:
        run = ActivationCache(folder, KEY, Source(sizes), shard_tokens)(begin)
        assert raws(islice(run, stop)) == expected(begin, sizes)[:stop]
        run.close()  # type: ignore[attr-defined]
    cache = ActivationCache(folder, KEY, Source(sizes), shard_tokens)
    assert raws(cache(start)) == expected(start, sizes)
    assert contents(folder) == contents(whole)


def test_harvesting_goes_on_after_the_last_whole_shard(tmp_path: Path) -> None:
    run = ActivationCache(tmp_path, KEY, Source(), 10)(0)
    list(islice(run, 5))  # batches 0 2 3 6 7: shards [0] [2 3] [6] are whole
    del run
    source = Source()
    cache = ActivationCache(tmp_path, KEY, source, 10)
    # what is missing before the start is harvested, but not given
    assert raws(cache(9)) == expected(9)
    assert source.starts == [7]
    assert source.read == [7, 8, 9, 10, 11]
    assert raws(cache(0)) == expected()


def test_killed_at_several_points(tmp_path: Path) -> None:
    """One folder, killed in the source, in the middle of a shard, before the index, and from outside."""
    filled(tmp_path / "whole")
    folder = tmp_path / "cut"
    before: dict[str, bytes] = {}
    for point, whole in (("source:3", 1), ("shard:2", 2), ("waiting:9", 4), ("index", 6)):
        child = Forked(Path(__file__), "write", folder, point)
        if point.startswith("waiting"):
            while child.poll() is None and not (folder.parent / "waiting").exists():
                time.sleep(0.01)
            with pytest.raises(StorageError) as caught:
                next(ActivationCache(folder, KEY, no_source)(0))
            one_line(caught.value, folder, "is being written by another process")
            child.kill()
        errors = child.communicate()[1]
        assert child.returncode == -signal.SIGKILL, errors
        assert shards(folder) == shards(tmp_path / "whole")[:whole]
        for name, data in before.items():
            assert (folder / name).read_bytes() == data
        before = {name: (folder / name).read_bytes() for name in shards(folder)}
        assert not ActivationCache(folder, KEY, no_source).complete
        # left by the kill, and gone with the next pass
        assert any(path.suffix == ".tmp" for path in folder.iterdir()) == point.startswith("shard")
    source = Source()
    assert raws(ActivationCache(folder, KEY, source, 10)(0)) == expected()
    assert source.starts == [12]
    assert contents(folder) == contents(tmp_path / "whole")


# --- one writer, many readers


def test_one_writer_at_a_time_and_readers_need_no_lock(tmp_path: Path) -> None:
    first = ActivationCache(tmp_path, KEY, Source(), 10)(0)
    next(first)
    with pytest.raises(StorageError) as caught:
        next(ActivationCache(tmp_path, KEY, no_source)(0))
    one_line(caught.value, tmp_path, "being written")
    list(first)
    with (tmp_path / ".lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert raws(ActivationCache(tmp_path, KEY, no_source)(0)) == expected()


def test_completed_by_another_process_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = ActivationCache(tmp_path, KEY, no_source, 10)
    lock = late._locked

    def after_the_other() -> Any:
        filled(tmp_path)
        return lock()

    monkeypatch.setattr(late, "_locked", after_the_other)
    assert raws(late(0)) == expected()


# --- keys and versions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "large"}, 'model = "tiny", now asked for "large"'),
        ({"layers": [4, 8]}, r"layers = \[4, 12\], now asked for \[4, 8\]"),
        ({"data": {"sha256": "ab"}}, r'data = .*"window": 512}, now asked for {"sha256": "ab"}'),
        ({"seed": 1}, "seed = null, now asked for 1"),
    ],
)
def test_another_key(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    filled(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        ActivationCache(tmp_path, {**KEY, **change}, no_source)
    one_line(caught.value, tmp_path)


def test_the_same_key_in_other_words(tmp_path: Path) -> None:
    filled(tmp_path)
    same = {**dict(reversed(list(KEY.items()))), "layers": (4, 12), "sink_factor": 1}
    assert raws(ActivationCache(tmp_path, same, no_source)(0)) == expected()
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        ActivationCache(tmp_path, {"model": object()}, no_source)
    with pytest.raises(ConfigError, match="shard_tokens"):
        ActivationCache(tmp_path, KEY, no_source, 0)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("changes", [{"format": 2}, {"shards": None}, {"complete": "yes"}])
def test_another_version_or_no_index(tmp_path: Path, changes: dict[str, Any]) -> None:
    filled(tmp_path)
    edit(tmp_path / "index.json", **changes)
    with pytest.raises(FormatError, match=r"index\.json: not the index of an activation cache of format 1"):
        ActivationCache(tmp_path, KEY, no_source)
    (tmp_path / "index.json").unlink()
    with pytest.raises(FormatError, match="delete the folder"):
        ActivationCache(tmp_path, KEY, no_source)


# --- damage


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def garble(path: Path) -> None:
    path.write_bytes(b"\xff" * 200)


def swap(path: Path) -> None:
    shutil.copy(path.parent / "shard_000000.safetensors", path)


def foreign(path: Path) -> None:
    """The same shard of a cache with another key."""
    other = ActivationCache(path.parent.parent / "other", {**KEY, "model": "other"}, Source(), 10)
    list(other(0))
    shutil.copy(other.folder / path.name, path)


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("damage", [truncate, garble, swap, foreign])
def test_damage_is_named_and_a_deleted_shard_is_harvested_again(
    tmp_path: Path, damage: Callable[[Path], None], complete: bool
) -> None:
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


# --- sources that do not keep their word


def test_a_source_that_ignores_the_start(tmp_path: Path) -> None:
    run = ActivationCache(tmp_path, KEY, Source(), 10)(0)
    list(islice(run, 5))
    del run
    cache = ActivationCache(tmp_path, KEY, lambda start: Source()(0), 10)
    with pytest.raises(ConfigError, match="the source gave batch 0 where 7 or a later one was due") as caught:
        list(cache(0))
    one_line(caught.value, tmp_path)
    twice = ActivationCache(tmp_path / "b", KEY, lambda start: iter([token_batch(3, 2), token_batch(3, 2)]))
    with pytest.raises(ConfigError, match="gave batch 3 where 4"):
        list(twice(0))


def test_batches_that_do_not_fit_together(tmp_path: Path) -> None:
    good, other = token_batch(0, 4), token_batch(1, 4)
    layers = other.activations
    for number, wrong in enumerate(
        (
            TokenBatch({**layers, 4: layers[4].float()}, other.visual, other.rows, other.positions, 1),
            TokenBatch({**layers, 4: layers[4][:, :2]}, other.visual, other.rows, other.positions, 1),
            TokenBatch({4: layers[4]}, other.visual, other.rows, other.positions, 1),
            TokenBatch({**layers, 4: layers[4][:1]}, other.visual, other.rows, other.positions, 1),
            TokenBatch(layers, other.visual, other.rows[:1], other.positions, 1),
            TokenBatch({}, other.visual, other.rows, other.positions, 1),
        )
    ):
        cache = ActivationCache(tmp_path / str(number), KEY, lambda start, wrong=wrong: iter([good, wrong]))
        with pytest.raises(ShapeError, match="batch 1"):
            list(cache(0))


# --- writes that fail


def test_a_write_that_the_system_refuses(tmp_path: Path) -> None:
    """Shards up to 10 tokens are some 1.6 kB with their headers; the fourth source batch is longer than the limit."""
    sizes = [5, 5, 5, 400, 5]
    child = Forked(Path(__file__), "limited", tmp_path / "cut", json.dumps(sizes))
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    result = json.loads(output)
    path = tmp_path / "cut" / "shard_000002.safetensors"
    assert result["type"] == "StorageError"
    assert result["message"].startswith(f"{path}: cannot be written (File too large); choose another folder")
    assert "\n" not in result["message"]
    assert result["errno"] == errno.EFBIG
    assert result["given"] == [0, 1, 2, 3]
    filled(tmp_path / "whole", 10, sizes)
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {
        ".lock",
        "index.json",
        *shards(tmp_path / "whole")[:2],
    }
    source = Source(sizes)
    assert raws(ActivationCache(tmp_path / "cut", KEY, source, 10)(0)) == expected(0, sizes)
    assert source.starts == [3]
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


# --- memory

WIDTH, BATCH, PER_SHARD, COUNT = 512, 512, 32, 320
MEGABYTES = WIDTH * BATCH * PER_SHARD * 2 / 2**20  # of a shard


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_memory_stays_flat(tmp_path: Path) -> None:
    """Ten shards of 16 MB: neither writing nor reading takes more than about one, and one batch next to nothing."""
    for mode, most, anonymous in (("fill", 1.6, 1.6), ("read", 1.6, 0.3)):
        # a process of its own from the start: what a forked one shares does not count as its memory
        command = [sys.executable, __file__, mode, str(tmp_path)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert child.returncode == 0, child.stderr
        result = json.loads(child.stdout)
        assert result["batches"] == COUNT
        assert result["first"] < 0.5 * MEGABYTES
        assert result["peak"] < most * MEGABYTES
        assert result["anonymous"] < anonymous * MEGABYTES
    assert len(shards(tmp_path)) == COUNT / PER_SHARD


def resident() -> tuple[float, float]:
    """Megabytes of this process in memory: all, and without what mapped files can give back."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(name + r":\s+(\d+)", status)[1]) / 1024 for name in ("VmRSS", "RssAnon"))  # type: ignore


def measured(folder: Path, fill: bool) -> dict[str, float]:
    template = torch.randn(BATCH, WIDTH).bfloat16()
    places = torch.arange(BATCH)

    def source(start: int) -> Iterator[TokenBatch]:
        for number in range(start, COUNT):
            yield TokenBatch({4: template + number}, places % 2 == 0, places, places, number)

    # so that imports and first calls are not counted
    warm = ActivationCache(folder.parent / f"warm_{fill}", KEY, lambda start: islice(source(start), 2))
    for batch in (*warm(0), *warm(0)):
        float(batch.activations[4].sum())
    cache = ActivationCache(folder, KEY, source if fill else no_source, BATCH * PER_SHARD)
    base = resident()
    result = {"batches": 0.0, "first": 0.0, "peak": 0.0, "anonymous": 0.0}
    for batch in cache(0):
        float(batch.activations[4].sum())
        now = resident()
        if not result["batches"]:
            result["first"] = now[0] - base[0]
        result["batches"] += 1
        result["peak"] = max(result["peak"], now[0] - base[0])
        result["anonymous"] = max(result["anonymous"], now[1] - base[1])
    return result


def limited(folder: Path, sizes: list[int]) -> dict[str, Any]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    given_out: list[int] = []
    try:
        for batch in ActivationCache(folder, KEY, Source(sizes), 10)(0):
            given_out.append(batch.batch)
    except SAEError as error:
        return {
            "type": type(error).__name__,
            "message": str(error),
            "errno": getattr(error, "errno", None),
            "given": given_out,
        }
    return {"given": given_out}


def write(folder: Path, point: str) -> None:
    """Fill the cache and be killed: in the source, in a shard, before the index; or wait for it."""
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
    for batch in ActivationCache(folder, KEY, source, 10)(0):
        if kind == "waiting" and batch.batch == int(number):
            (folder.parent / "waiting").touch()
            signal.pause()


if __name__ == "__main__":
    torch.set_num_threads(1)
    mode, where = sys.argv[1], Path(sys.argv[2])
    if mode == "write":
        write(where, sys.argv[3])
    else:
        result = limited(where, json.loads(sys.argv[3])) if mode == "limited" else measured(where, mode == "fill")
        print(json.dumps(result))
