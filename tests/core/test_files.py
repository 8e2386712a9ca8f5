"""Atomic writes and JSON errors."""

import os
from pathlib import Path

import pytest

from remind.core.errors import DataError
from remind.core.files import (
    atomic_folder,
    atomic_path,
    read_json,
    sweep,
    write_json,
)


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
