"""Files are whole or absent, and what the system refuses becomes one line that names the file.

Run as a script, this file is the process whose file sizes are limited.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import Forked
from safetensors import safe_open
from safetensors.torch import load_file

from sae import DocumentFrequency, FormatError, SAEError, TopKSAE, files, save_idf
from sae.errors import StorageError

LIMIT = 4096
BIG = {"a": torch.arange(5000.0)}


def write_text(path: Path) -> None:
    with files.atomic(path) as temporary:
        temporary.write_text("x" * 5000, encoding="utf-8")


# what writes, and the name of the file it cannot write
WRITERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "tensors": (lambda folder: files.write_tensors(folder / "a.safetensors", BIG), "a.safetensors"),
    "json": (lambda folder: files.write_json(folder / "a.json", {"a": "x" * 5000}), "a.json"),
    "atomic": (lambda folder: write_text(folder / "a.txt"), "a.txt"),
    "coder": (lambda folder: TopKSAE(16, 128, 4).save(folder), "sae_weights.safetensors"),
    "idf": (lambda folder: save_idf(folder, DocumentFrequency(5000)), "idf.safetensors"),
}


def test_a_limit_of_the_system(tmp_path: Path) -> None:
    for name, (_, target) in WRITERS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / target).write_text("as it was")
    child = Forked(Path(__file__), tmp_path)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    outcomes = json.loads(output)
    for name, (_, target) in WRITERS.items():
        path = tmp_path / name / target
        kind, number, message = outcomes[name]
        assert kind == "StorageError"
        assert number == errno.EFBIG
        assert message == f"{path}: cannot be written (File too large); choose another folder"
        assert path.read_text() == "as it was"
        assert [p.name for p in path.parent.iterdir()] == [target]


@pytest.mark.parametrize("name", WRITERS)
def test_a_path_below_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    write = WRITERS[name][0]
    with pytest.raises(StorageError, match=r"cannot be written \(Not a directory\).*choose another folder") as caught:
        write(tmp_path / "file" / "folder")
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "file" / "folder") in str(caught.value)
    assert caught.value.errno == errno.ENOTDIR
    assert isinstance(caught.value, SAEError)
    assert isinstance(caught.value, OSError)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("name", WRITERS)
def test_a_read_only_folder(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(StorageError, match=r"\(Permission denied\); choose another folder"):
            WRITERS[name][0](tmp_path)
    finally:
        tmp_path.chmod(0o700)


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    with pytest.raises(StorageError, match=r"a\.json: cannot be written \(Is a directory\)"):
        files.write_json(tmp_path / "a.json", {})
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_what_is_written(tmp_path: Path) -> None:
    files.write_json(tmp_path / "new" / "a.json", {"a": [1, "é"]})
    files.write_tensors(tmp_path / "b.safetensors", {"b": BIG["a"][::2], "c": torch.ones(2).bfloat16()}, {"d": "e"})
    assert json.loads((tmp_path / "new" / "a.json").read_text(encoding="utf-8")) == {"a": [1, "é"]}
    found = load_file(tmp_path / "b.safetensors")
    assert torch.equal(found["b"], torch.arange(0.0, 5000.0, 2))
    assert found["c"].dtype == torch.bfloat16
    with safe_open(tmp_path / "b.safetensors", framework="pt") as file:
        assert file.metadata() == {"d": "e"}
    ordinary = tmp_path / "ordinary"
    ordinary.write_text("")
    for path in (tmp_path / "new" / "a.json", tmp_path / "b.safetensors"):
        assert path.stat().st_mode == ordinary.stat().st_mode
    assert {p.name for p in tmp_path.iterdir()} == {"new", "b.safetensors", "ordinary"}


def test_errors_of_the_writer_itself_pass_and_leave_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("as it was")
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), files.atomic(target) as temporary:
            temporary.write_text("half")
            raise error
    with pytest.raises(FormatError, match="cannot be written as JSON"):
        files.write_json(target, {"a": float("nan")})
    assert target.read_text() == "as it was"
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_reading_keeps_its_errors(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("{")
    for read in (files.read_json, files.read_tensors):
        with pytest.raises(FormatError, match=r"b: no such file"):
            read(tmp_path / "b")
        with pytest.raises(FormatError, match=r"a: (not readable as JSON|damaged)"):
            read(tmp_path / "a")


def test_sweep_takes_temporaries_of_these_names_only(tmp_path: Path) -> None:
    names = [".part_1.x.aa.tmp", ".part_22.x.bb.tmp", ".part_1.y.aa.tmp", "part_1.x", ".other.x.aa.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("half")
    files.sweep(tmp_path, "part_*.x")
    assert {p.name for p in tmp_path.iterdir()} == set(names[2:])


def test_sweep_knows_the_temporaries_of_atomic(tmp_path: Path) -> None:
    with pytest.raises(StorageError), files.atomic(tmp_path / "part_1.x") as temporary:
        temporary.write_text("half")
        (temporary.parent / ".tmpAbCdEf").write_text("what a library leaves")
        files.sweep(tmp_path, "part_*.x")
        assert list(tmp_path.iterdir()) == []


if __name__ == "__main__":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    outcome: dict[str, tuple[str, int | None, str]] = {}
    for key, (writer, _) in WRITERS.items():
        try:
            writer(Path(sys.argv[1]) / key)
        except Exception as error:
            outcome[key] = (type(error).__name__, getattr(error, "errno", None), str(error))
    print(json.dumps(outcome))
