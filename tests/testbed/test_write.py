"""A world on disk: reproducible, read back as it was, whole or absent; and the script that makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import solver
from in_process import run_script

import remind
from remind.core.errors import ConfigError
from remind.states.dataset import read_manifest, read_states
from remind.states.pyramid import render_answer
from remind.testbed.ladder import LabelConfig, LadderConfig, MakeWorldConfig, records, write_world
from remind.testbed.world import WorldConfig, make_world

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_world.py"
WORLD = WorldConfig(train=2, dev=1, test=2)


def elsewhere(script: Path, *arguments: str) -> tuple[int, str, str]:
    """In a process whose hashes of strings are not this one's."""
    environment = {**os.environ, "PYTHONHASHSEED": str(hash("a") % 2**32)}
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_processes_write_the_same_bytes_and_another_seed_writes_others(tmp_path: Path) -> None:
    size = ("--world.train", "2", "--world.dev", "1", "--world.test", "1", "--world.speakers", "3")
    folders = []
    for number, (seed, script) in enumerate((("0", run_script), ("0", elsewhere), ("1", run_script))):
        out = tmp_path / str(number)
        status, output, errors = script(SCRIPT, "--out", str(out), *size, "--labels.noise", ".3", "--world.seed", seed)
        assert status == 0, errors
        assert "4 dialogues" in output
        folders.append(contents(out))
    one, again, other = folders
    assert {"truth.jsonl", "world.jsonl", "states/manifest.json", "states/test-test-0000.parquet"} < set(one)
    assert one == again
    assert one.keys() == other.keys()
    assert not [name for name in one if one[name] == other[name]]


def test_the_files_hold_the_world_and_the_truth(tmp_path: Path) -> None:
    ladder, labels, world = LadderConfig(decoys=2, seed=4), LabelConfig(noise=0.5, labelled=20), make_world(WORLD)
    out = tmp_path / "w"
    write_world(MakeWorldConfig(str(out), WORLD, ladder=ladder, labels=labels))
    with pytest.raises(ConfigError, match="exists; choose another out or set overwrite"):
        write_world(MakeWorldConfig(str(out), WORLD))
    corpus = remind.read(out / "world.jsonl")
    assert corpus == world.corpus
    assert corpus.references == sum(len(question.evidence) for question in corpus.questions) > 0
    assert read_states(out / "states") == records(world, ladder, labels)
    assert read_manifest(out / "states")["ladder"]["seed"] == 4
    rows = [json.loads(line) for line in (out / "truth.jsonl").read_text(encoding="utf-8").splitlines()]
    for row, question in zip(rows, corpus.questions, strict=True):
        dialogue = corpus.dialogue(row["dialogue"])
        problem = solver.from_dialogue(dialogue, question)
        assert (row["dimension"], row["speaker"], row["topic"] or "") == solver.understand(question.text)
        assert solver.answer(problem, row["value"]) == solver.solve(problem) == render_answer(question)
        assert row["evidence"] == list(question.evidence)
        against = solver.remarks(solver.from_dialogue(dialogue, question, row["contrary"]))
        assert against == [remark for remark in solver.remarks(problem) if remark.flagged]
