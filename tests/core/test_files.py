"""Atomic writes, JSON, the content-hash cache, and disks that cannot be written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from remind.core.errors import DataError
from remind.core.files import Cache, atomic_folder, atomic_path, read_json, sweep, write_json


def test_a_failed_write_leaves_the_old_file_or_folder(tmp_path: Path) -> None:
    file, target = tmp_path / "deep" / "a.json", tmp_path / "out"
    write_json(file, {"a": 1})
    with pytest.raises(RuntimeError), atomic_path(file) as temporary:
        temporary.write_text("half")
        raise RuntimeError
    assert read_json(file) == {"a": 1}
    with atomic_folder(target) as folder:
        (folder / "x").write_text("1")
    with pytest.raises(RuntimeError), atomic_folder(target) as folder:
        (folder / "y").write_text("2")
        raise RuntimeError
    assert names(target) == ["x"]
    with atomic_folder(target) as folder:
        (folder / "z").write_text("3")
    assert (names(target), names(file.parent), names(tmp_path)) == (["z"], ["a.json"], ["deep", "out"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_killed_processes_left_is_swept(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with atomic_path(tmp_path / "a.json"), atomic_folder(tmp_path / "out") as folder:
            (folder / "x").write_text("half")
            os._exit(9)
    os.waitpid(child, 0)
    write_json(tmp_path / "b.json", 1)
    (tmp_path / ".hidden").write_text("mine")
    assert len(names(tmp_path)) == 4
    sweep(tmp_path)
    assert names(tmp_path) == [".hidden", "b.json"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b": }', r"bad\.json \[line 2\]: not JSON"),
        (b"[" * 200_000, "not JSON"),
    ],
)
def test_bad_json_is_one_line_with_file_and_place(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read_json(path)
    assert "\n" not in str(caught.value)


def test_tensors_and_json_come_back_as_they_were_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.arange(5), "empty": torch.empty(0, 2)}
    assert cache.read("codes", {"x": 1}) is None
    cache.write("codes", {"x": 1, "y": [2]}, tensors, {"é": [1, None]})
    entry = cache.read("codes", {"y": [2], "x": 1})
    assert entry is not None
    assert entry[1] == {"é": [1, None]}
    assert all(torch.equal(entry[0][name], value) for name, value in tensors.items())
    assert cache.read("codes", {"x": 1, "y": [3]}) is None
    assert cache.read("targets", {"x": 1, "y": [2]}) is None


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: Cache(folder).write("codes", 1, {"a": torch.arange(100_000)}),
        lambda folder: write_json(folder / "a.json", "x" * 500_000),
    ],
)
def test_a_full_disk_is_an_error_that_scripts_show_in_a_line_and_leaves_nothing(
    small_disk: Path, write: Callable[[Path], None]
) -> None:
    with pytest.raises(OSError, match=f"No space left on device.*{small_disk}"):
        write(small_disk)
    assert not [path for path in small_disk.rglob("*") if path.is_file() or path.name.endswith(".tmp")]
