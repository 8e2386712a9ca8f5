"""Killed anywhere, no room, no right to write, an input that vanishes: one clear line, nothing half-written or lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked
from small_corpus import contents

import remind.pipeline.build
from remind.core.errors import ConfigError, DataError
from remind.pipeline import BuildStatesConfig, build_states
from remind.pipeline.assemble import Parts, assemble
from remind.states.parquet import read_manifest, read_states


def written(cache: Path) -> int:
    return sum(1 for path in cache.rglob("*") if path.is_file() and not path.name.startswith("."))


@pytest.mark.slow
def test_a_build_that_is_killed_anywhere_ends_with_the_same_bytes(
    corpus: Path, tmp_path: Path, start: Callable[..., Forked]
) -> None:
    """One and two workers in turns: each goes on with what the other has left."""
    process = start(corpus, tmp_path / "whole", tmp_path / "whole-cache")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    files = written(tmp_path / "whole-cache")
    assert files > 20
    draw = random.Random(1)
    out, cache = tmp_path / "out", tmp_path / "cache"
    for kill in range(int(os.environ.get("REMIND_KILLS", "2"))):
        process = start(corpus, out, cache, "--workers", "12"[kill % 2])
        enough = draw.randint(min(written(cache) + 1, files), files)
        while process.returncode is None and written(cache) < enough:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        # whole or not there, also where the kill came after the last step
        assert out.exists() or process.returncode
        if out.exists():
            assert contents(out) == contents(tmp_path / "whole")
            shutil.rmtree(out)
    process = start(corpus, out, cache)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert contents(out) == contents(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


@pytest.mark.slow
def test_workers_do_not_outlive_a_killed_parent(corpus: Path, tmp_path: Path, start: Callable[..., Forked]) -> None:
    process = start(corpus, tmp_path / "out", tmp_path / "cache", "--workers", "2")
    while process.returncode is None and not (tmp_path / "cache" / "index").exists():
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    for _ in range(600):
        # the group is the parent's own session: whoever is still in it was left behind
        if subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, check=False).returncode:
            return
        time.sleep(0.05)
    pytest.fail("a worker goes on without its parent")


def _fill(folder: Path, leave: int) -> None:
    free = shutil.disk_usage(folder).free
    (folder / "filler").write_bytes(b"x" * max(0, free - leave))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cache", "out"])
def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    corpus: Path, tmp_path: Path, small_disk: Path, start: Callable[..., Forked], place: str
) -> None:
    out = small_disk / "out" if place == "out" else tmp_path / "out"
    cache = small_disk / "cache" if place == "cache" else tmp_path / "cache"
    _fill(small_disk, 24 << 10 if place == "cache" else 16 << 10)
    process = start(corpus, out, cache, "--keep_codes", "false")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    last = errors.strip().splitlines()[-1]
    assert last.startswith("error: "), errors
    assert f"{small_disk}/{place}" in last
    assert "No space left on device" in last
    assert not out.exists()
    assert not [path for path in small_disk.rglob("*") if path.name.startswith(".") or path.suffix == ".tmp"]
    assert not (small_disk / "out.partial").exists()
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    process = start(corpus, out, cache, "--keep_codes", "false")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert len(read_states(out)) == 12


def test_what_another_build_has_put_there_meanwhile_stays(tmp_path: Path) -> None:
    out, parts = tmp_path / "out", Parts(tmp_path / "cache")
    for _ in range(2):
        assemble(out, parts, [], {"build": "one"}, overwrite=False)
    with pytest.raises(ConfigError, match="out exists, built from other input or settings"):
        assemble(out, parts, [], {"build": "other"}, overwrite=False)
    assert read_manifest(out)["build"] == "one"
    assemble(out, parts, [], {"build": "other"}, overwrite=True)
    assert read_manifest(out)["build"] == "other"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["cache", "out"])
def test_a_read_only_folder_is_one_line(
    corpus: Path, tmp_path: Path, small_disk: Path, start: Callable[..., Forked], place: str
) -> None:
    (small_disk / "cache").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    out = small_disk / "out" if place == "out" else tmp_path / "out"
    cache = small_disk / "cache" if place == "cache" else tmp_path / "cache"
    process = start(corpus, out, cache)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert errors.count("\n") == 1, errors
    assert "Read-only file system" in errors
    assert str(small_disk) in errors


@pytest.mark.slow
def test_an_input_that_goes_or_changes_is_told(
    corpus: Path, minilm_sae: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = BuildStatesConfig(str(corpus), str(tmp_path / "out"), sae=str(minilm_sae), cache=str(tmp_path / "cache"))
    whole, real = corpus.read_text(), remind.pipeline.build.outline

    def then(change: str | None) -> None:
        def outlined(*arguments: object) -> object:
            found = real(*arguments)  # type: ignore[arg-type]
            corpus.unlink() if change is None else corpus.write_text(change)
            return found

        monkeypatch.setattr(remind.pipeline.build, "outline", outlined)
        corpus.write_text(whole)

    lines = whole.splitlines(keepends=True)
    for change, word in (
        (None, "no such file"),
        ("".join(lines[:-3]), "1 dialogues are missing"),
        (whole.replace("q3a", "q3z"), "has changed while it was read"),
        (whole.replace("Mostly tea", "Mostly milk"), "has changed while the states were built"),
    ):
        then(change)
        with pytest.raises(DataError, match=word):
            build_states(cfg)
        assert not (tmp_path / "out").exists()


def test_damaged_states_of_a_dialogue_are_built_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "parts")
    parts.put("ab12", [], {"seconds": 1})
    assert parts.account("ab12") == {"seconds": 1}
    part = next((tmp_path / "parts").rglob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-1] + b"x")
    assert parts.account("ab12") is None
    with pytest.raises(DataError, match="has changed since it was built"):
        parts.copy("ab12", tmp_path / "copy.parquet")
    assert not (tmp_path / "copy.parquet").exists()
    part.unlink()
    assert parts.account("ab12") is None
