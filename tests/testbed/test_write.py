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
from in_process import run_script

import remind
from remind.core.errors import ConfigError
from remind.states.dataset import read_manifest, read_states
from remind.states.pyramid import render_answer
from remind.testbed import write
from remind.testbed.labels import LabelConfig
from remind.testbed.ladder import LadderConfig, records
from remind.testbed.world import WorldConfig, make_world
from remind.testbed.write import MakeWorldConfig, write_world

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


def make(out: Path, **others: object) -> Path:
    write_world(MakeWorldConfig(str(out), WORLD, **others))  # type: ignore[arg-type]
    return out


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
    ids = ("train-train-0000", "train-train-0001", "dev-dev-0000", "test-test-0000")
    files = ["manifest.json", "README.md", *(f"{name}.parquet" for name in ids)]
    assert sorted(one) == sorted([*(f"states/{name}" for name in files), "truth.jsonl", "world.jsonl"])
    assert one == again
    assert one.keys() == other.keys()
    assert not [name for name in one if one[name] == other[name]]


def test_the_reader_gives_the_world_back(tmp_path: Path) -> None:
    world = make_world(WORLD)
    corpus = remind.read(make(tmp_path / "w", labels=LabelConfig(noise=1, labelled=3)) / "world.jsonl")
    assert corpus == world.corpus
    assert corpus.dangling == ()
    assert corpus.references == sum(len(question.evidence) for question in corpus.questions) > 0
    held = {dialogue.id: {turn.id for turn in dialogue.turns} for dialogue in corpus.dialogues}
    assert all(set(question.evidence) <= held[question.dialogue_id] for question in corpus.questions)


def test_the_truth_is_what_the_dialogues_show(tmp_path: Path) -> None:
    out = make(tmp_path / "w")
    corpus = remind.read(out / "world.jsonl")
    rows = [json.loads(line) for line in (out / "truth.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["question"] for row in rows] == [question.id for question in corpus.questions]
    for row, question in zip(rows, corpus.questions, strict=True):
        dialogue = corpus.dialogue(row["dialogue"])
        problem = solver.from_dialogue(dialogue, question)
        assert (row["dimension"], row["speaker"], row["topic"] or "") == solver.understand(question.text)
        assert (row["split"], row["dialogue"]) == (question.split, question.dialogue_id)
        assert solver.answer(problem, row["value"]) == solver.solve(problem) == render_answer(question)
        assert row["evidence"] == list(question.evidence)
        against = solver.remarks(solver.from_dialogue(dialogue, question, row["contrary"]))
        assert against == [remark for remark in solver.remarks(problem) if remark.flagged]
        assert row["contrary"] == sorted(row["contrary"], key=dialogue.positions.__getitem__)


def test_states_and_manifest_have_what_was_asked_for(tmp_path: Path) -> None:
    ladder, labels = LadderConfig(decoys=2, wrong_summaries=0.3, seed=4), LabelConfig(noise=0.5, labelled=20)
    out = make(tmp_path / "w", ladder=ladder, labels=labels)
    assert read_states(out / "states") == records(make_world(WORLD), ladder, labels)
    manifest = read_manifest(out / "states")
    assert (manifest["world"]["train"], manifest["ladder"]["seed"], manifest["labels"]["noise"]) == (2, 4, 0.5)


def test_an_existing_folder_is_replaced_only_where_that_is_asked_for(tmp_path: Path) -> None:
    out = make(tmp_path / "w")
    before = contents(out)
    with pytest.raises(ConfigError, match="exists; choose another out or set overwrite"):
        make(out, ladder=LadderConfig(seed=1))
    assert contents(out) == before
    make(out, ladder=LadderConfig(seed=1), overwrite=True)
    after = contents(out)
    assert after.keys() == before.keys()
    assert after["world.jsonl"] == before["world.jsonl"]
    changed = [name for name in before if name.endswith(".parquet") and after[name] != before[name]]
    assert len(changed) == len([name for name in before if name.endswith(".parquet")])
    (tmp_path / "diary").mkdir()
    (tmp_path / "diary" / "monday.txt").write_text("dear diary")
    with pytest.raises(ConfigError, match="not a world made earlier"):
        make(tmp_path / "diary", overwrite=True)
    assert contents(tmp_path / "diary") == {"monday.txt": b"dear diary"}


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    out = tmp_path / "w"
    if there:
        make(out)
    before = contents(tmp_path)

    def fails(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(write, "write_states", fails)
    with pytest.raises(OSError, match="disk full"):
        write_world(MakeWorldConfig(str(out), replace(WORLD, seed=9), overwrite=True))
    assert contents(tmp_path) == before
    assert out.exists() == there
    assert len(list(tmp_path.iterdir())) == there
