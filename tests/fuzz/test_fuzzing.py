"""The fuzzer itself: it finds what is planted, keeps it, replays it, and finds nothing in what there is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import FuzzConfig, fuzz
from fuzzing.mutate import mutate
from fuzzing.run import START, at_random, save
from fuzzing.targets import Target, make_targets, wrong

from remind.core.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", list(make_targets()))
def test_nothing_is_found(tmp_path, name):
    target = make_targets()[name]
    rng = random.Random(1)
    for data in (*target.seeds, *(target.mutate(rng.choice(target.seeds), rng) for _ in range(25))):
        assert wrong(target, data, tmp_path) is None, data


def test_seeds_are_valid(tmp_path):
    for name, target in make_targets().items():
        for data in target.seeds:
            target.run(data, tmp_path)
        assert target.seeds, name


def test_a_planted_fault_is_found_kept_once_and_told(tmp_path):
    def run(data: bytes, folder: Path) -> None:
        if b"NaN" in data:
            raise KeyError("planted")

    target = Target((json.dumps({"a": 1}).encode(),), run)
    cases = at_random("locomo", target, 1.0, tmp_path, seed=3)
    (found,) = [path for path in tmp_path.iterdir() if path.suffix != ".txt"]
    assert cases > 1
    assert b"NaN" in found.read_bytes()
    assert wrong(target, found.read_bytes(), tmp_path) == "KeyError: 'planted'"
    assert found.with_suffix(".txt").read_text() == "KeyError: 'planted'\n"


def test_what_is_slow_or_of_several_lines_is_wrong(tmp_path, monkeypatch):
    monkeypatch.setattr("fuzzing.targets.SLOW", -1.0)
    assert "took" in str(wrong(Target((), lambda data, folder: None), b"", tmp_path))

    def two_lines(data: bytes, folder: Path) -> None:
        raise type("Two", (DataError,), {"__str__": lambda self: "a\nb"})("x")

    assert wrong(Target((), two_lines), b"", tmp_path) == "Two is not one line"


def test_replay(tmp_path, capsys):
    path = save(tmp_path, "json", b"{}", "it was wrong once")
    fuzz(FuzzConfig(replay=str(path)))
    assert "taken as it should be" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="does not begin with a target's name"):
        fuzz(FuzzConfig(replay=str(path.rename(tmp_path / "other"))))


def test_settings():
    with pytest.raises(ConfigError, match="no target 'x'; there are refmem, locomo"):
        fuzz(FuzzConfig(targets=["x"]))
    with pytest.raises(ConfigError, match="must be more than 0"):
        FuzzConfig(seconds=0)


def test_the_script(tmp_path):
    command = [sys.executable, str(ROOT / "tests" / "fuzz" / "fuzzing"), "--guide", "random", "--seconds", "2"]
    command += ["--targets", "[chat, answer]", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "chat: " in done.stdout
    counts = json.loads((tmp_path / "out" / "counts.json").read_text())
    assert [(name, count["findings"]) for name, count in counts.items()] == [("chat", 0), ("answer", 0)]


@pytest.mark.parametrize("target", ["refmem", "json"])
def test_guided_by_coverage(tmp_path, target):
    """The readers, which the package imports itself, are followed as all else is: else it is told to be blind."""
    pytest.importorskip("atheris", reason="needs atheris (pip install atheris)")
    counts = fuzz(FuzzConfig(seconds=3, targets=[target], out=str(tmp_path / "out"), guide="coverage"))
    assert counts[target].cases > 10
    assert counts[target].findings == 0


def test_a_fuzzer_that_sees_nothing_is_no_fuzzer(tmp_path, monkeypatch):
    pytest.importorskip("atheris", reason="needs atheris (pip install atheris)")
    monkeypatch.setattr("fuzzing.run.START", START.replace('["remind"]', '["elsewhere"]'))
    with pytest.raises(DataError, match="blind"):
        fuzz(FuzzConfig(seconds=2, targets=["refmem"], out=str(tmp_path / "out"), guide="coverage"))


def test_what_is_nested_too_deeply_to_be_copied_is_mutated_as_bytes():
    deep = ('{"a": ' * 5000 + "1" + "}" * 5000).encode()
    made = {mutate(deep, random.Random(seed)) for seed in range(20)}
    assert len(made - {deep}) > 10
