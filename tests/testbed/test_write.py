"""A world on disk: reproducible, read back as it was, whole or absent; and the script that makes it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import solver

import remind
from remind.core.errors import ConfigError
from remind.states.dataset import read_manifest, read_states
from remind.states.pyramid import render_answer
from remind.testbed.ladder import LabelConfig, LadderConfig, MakeWorldConfig, records, write_world
from remind.testbed.world import WorldConfig, make_world

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_world.py"
WORLD = WorldConfig(train=2, dev=1, test=2)


def test_two_processes_write_the_same_bytes_and_another_seed_writes_others(tmp_path: Path) -> None:
    small = WorldConfig(train=1, dev=0, test=1, sessions=3)
    for seed in (0, 1):
        write_world(
            MakeWorldConfig(str(tmp_path / str(seed)), replace(small, seed=seed), labels=LabelConfig(noise=0.3))
        )
    size = "--world.train 1 --world.dev 0 --world.test 1 --world.sessions 3 --labels.noise .3"
    # hashes of strings are not this process's
    environment = {**os.environ, "PYTHONHASHSEED": str(hash("a") % 2**32)}
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path / "again"), *size.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "2 dialogues" in done.stdout
    one, other, again = (
        {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}
        for out in (tmp_path / name for name in ("0", "1", "again"))
    )
    assert one == again
    assert one.keys() == other.keys() > {Path("truth.jsonl"), Path("world.jsonl"), Path("states/manifest.json")}
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
        assert solver.Asked(row["dimension"], row["speaker"], row["topic"] or "") == problem.asked
        assert solver.answer(problem, row["value"]) == solver.solve(problem) == render_answer(question)
        assert row["evidence"] == list(question.evidence)
        against = solver.remarks(solver.from_dialogue(dialogue, question, row["contrary"]))
        assert against == [remark for remark in solver.remarks(problem) if remark.flagged]
