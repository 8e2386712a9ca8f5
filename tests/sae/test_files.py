"""Files are whole or absent, and what the system refuses becomes one line that names the file."""

from __future__ import annotations

import errno
import json
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from sae import DocumentFrequency, FormatError, SAEError, StorageError, TopKSAE, files, save_idf

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


@contextmanager
def limited_size() -> Iterator[None]:
    """No file of this process grows beyond `LIMIT`."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("name", WRITERS)
def test_what_cannot_be_written(tmp_path: Path, name: str) -> None:
    write, target = WRITERS[name]
    path, folder = tmp_path / target, tmp_path / "new" / target
    path.write_text("as it was")
    folder.mkdir(parents=True)
    for place, limit, number, reason in (
        (tmp_path, limited_size(), errno.EFBIG, "File too large"),
        (path / "folder", nullcontext(), errno.ENOTDIR, "Not a directory"),
        (tmp_path / "new", nullcontext(), errno.EISDIR, "Is a directory"),
    ):
        with pytest.raises(StorageError) as caught, limit:
            write(place)
        assert str(caught.value) == f"{caught.value.path}: cannot be written ({reason}); choose another folder"
        assert str(caught.value.path).startswith(str(place))
        assert isinstance(caught.value, SAEError)
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == number
        assert path.read_text() == "as it was"
    assert {p.name for p in tmp_path.iterdir()} == {target, "new"}
    assert [p.name for p in folder.parent.iterdir()] == [target]


def test_what_is_written(tmp_path: Path) -> None:
    files.write_json(tmp_path / "new" / "a.json", {"a": [1, "é"]})
    files.write_tensors(tmp_path / "b.safetensors", {"b": BIG["a"][::2], "c": torch.ones(2).bfloat16()}, {"d": "e"})
    assert json.loads((tmp_path / "new" / "a.json").read_text(encoding="utf-8")) == {"a": [1, "é"]}
    tensors = load_file(tmp_path / "b.safetensors")
    assert torch.equal(tensors["b"], torch.arange(0.0, 5000.0, 2))
    assert tensors["c"].dtype == torch.bfloat16
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


def test_sweep_takes_temporaries_of_these_names_only(tmp_path: Path) -> None:
    names = [".part_22.x.bb.tmp", ".part_1.y.aa.tmp", "part_1.x", ".other.x.aa.tmp"]
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(StorageError), files.atomic(tmp_path / "part_1.x") as temporary:
        temporary.write_text("half")
        (temporary.parent / ".tmpAbCdEf").write_text("what a library leaves")
        files.sweep(tmp_path, "part_*.x")
        assert {p.name for p in tmp_path.iterdir()} == set(names[1:])
