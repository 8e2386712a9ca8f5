"""Folders of a run: whose they are, what is refused, what a killed run leaves, and the script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from in_process import run_script
from scripted_answers import RIGHT, Chat, Judge, by

from remind.core.errors import ConfigError, DataError, ModelError
from remind.evaluation import answerers
from remind.evaluation.conditions import questions_of
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.predictions import appending, read_rows
from remind.evaluation.run import run_evaluation
from remind.llm.request import Reply
from remind.models.generate import Generation
from remind.models.nano import save_nano
from remind.states.records import StateRecord

ROOT = Path(__file__).parents[2]


def test_another_runs_folder_is_refused_unless_overwrite(
    local: EvaluateConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def fake(
        backbone: object, prompts: object, new: int, batch: int, done: Sequence[bool], on_output: Any, *_: object
    ) -> None:
        for index in (n for n, skip in enumerate(done) if not skip):
            asked.append(index)
            on_output(index, Generation("<answer>B</answer>", 10, 3, True))

    monkeypatch.setattr(answerers, "generate", fake)
    run_evaluation(local, Judge())
    asked.clear()
    before = {path.name: path.read_bytes() for path in Path(local.out).iterdir()}
    with pytest.raises(ConfigError, match=r"differs in level, max_new_tokens; choose another out"):
        run_evaluation(replace(local, level="x1", max_new_tokens=7), Judge())
    other = str(save_nano(tmp_path / "other", seed=1))
    with pytest.raises(ConfigError, match="differs in model;"):
        run_evaluation(replace(local, model=other), Judge())
    assert {path.name: path.read_bytes() for path in Path(local.out).iterdir()} == before
    assert asked == []
    # the same weights from a folder are the same model
    assert (
        run_evaluation(replace(local, model=str(save_nano(tmp_path / "same")), batch_size=5), Judge())["resumed"] == 6
    )
    assert run_evaluation(replace(local, level="x1", overwrite=True), Judge())["resumed"] == 0
    assert len(asked) == 6


def test_a_folder_of_something_else_is_refused(cfg: EvaluateConfig) -> None:
    Path(cfg.out).mkdir()
    (Path(cfg.out) / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        run_evaluation(cfg, Judge(), answerer=by(Chat()))
    with pytest.raises(ConfigError, match="is a file"):
        run_evaluation(replace(cfg, out=str(Path(cfg.out) / "thesis.tex")), Judge(), answerer=by(Chat()))
    (Path(cfg.out) / "run.json").write_text('{"format": "else"}')
    with pytest.raises(DataError, match="not the identity"):
        run_evaluation(cfg, Judge(), answerer=by(Chat()))
    assert (Path(cfg.out) / "thesis.tex").read_text() == "mine"


def test_states_that_do_not_serve(
    cfg: EvaluateConfig, tmp_path: Path, make_record: Callable[..., StateRecord], write_states: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match=r"no questions of split 'dev' \(there are: test, train\)"):
        run_evaluation(replace(cfg, split="dev"), Judge(), answerer=by(Chat()))
    with pytest.raises(DataError, match="not a states folder"):
        run_evaluation(replace(cfg, states=str(tmp_path / "nowhere")), Judge(), answerer=by(Chat()))
    twice = write_states(make_record("q"), make_record("q"), name="twice")
    with pytest.raises(DataError, match=r"\[q\]: the question occurs twice"):
        list(questions_of(twice, "test"))
    shared = write_states(make_record("a"), replace(make_record("b", split="train"), dialogue_id="d-a"), name="shared")
    with pytest.raises(DataError, match="evidence of training question b too"):
        list(questions_of(shared, "test"))
    assert not Path(cfg.out).exists()
    for limit, ids in ((3, ["s1", "v1", "d2"]), (99, ["s1", "m1", "v1", "d1", "d2", "m2"])):
        found = [record.question_id for one in questions_of(cfg.states, "test", limit) for record in one.records]
        assert found == ids


def test_models_and_settings_that_do_not_serve(cfg: EvaluateConfig) -> None:
    for model in ("does/not/exist", "minilm"):
        with pytest.raises(ModelError, match=model) as caught:
            run_evaluation(replace(cfg, answers="local", model=model), Judge())
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"no endpoint for stage answer; set llm.answer"):
        run_evaluation(cfg, Judge())
    with pytest.raises(ConfigError, match=r"no endpoint for stage judge; set llm.judge"):
        run_evaluation(replace(cfg, judge="llm"), answerer=by(Chat()))
    assert not Path(cfg.out).exists()
    silent: dict[str, Reply | str] = dict.fromkeys(RIGHT, Reply("", failure="server", message="no memory"))
    with pytest.raises(ModelError, match="none of 6 questions: no memory"):
        run_evaluation(cfg, Judge(), answerer=by(Chat(silent)))


def test_a_killed_run_asks_again_only_what_was_under_way(cfg: EvaluateConfig) -> None:
    after = "answer v1"
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = os.fdopen(writer, "w")
            run_evaluation(cfg, Judge(stuck_at=after, said=said), answerer=by(Chat(stuck_at=after, said=said)))  # type: ignore[arg-type]
        finally:
            os._exit(0)
    os.close(writer)
    seen = []
    with os.fdopen(reader) as lines:
        for line in lines:
            seen.append(line.strip())
            if seen[-1] == after:
                os.kill(pid, signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert seen[-1] == after
    chat, judge = Chat(), Judge()
    report = run_evaluation(cfg, judge, answerer=by(chat))
    again = [f"answer {name}" for name in chat.ids] + [f"judge {text}" for text in judge.asked]
    assert set(seen) & set(again) == {after}
    assert len(set(seen) | set(again)) == 8
    assert report["overall"]["accuracy"]["value"] == 1.0


def test_readers_of_rows_change_nothing_and_writers_cut_off_what_is_unfinished(tmp_path: Path) -> None:
    path = tmp_path / "predictions.jsonl"
    with appending(path) as put:
        put({"question_id": "a"})
        with path.open("a") as file:
            file.write('{"question_id": "b"')
        before = path.read_bytes(), path.stat().st_ino
        assert [row["question_id"] for _, row in read_rows(path, "an output")] == ["a"]
        assert (path.read_bytes(), path.stat().st_ino) == before
    with appending(path) as put:
        put({"question_id": "c"})
    assert [row["question_id"] for _, row in read_rows(path, "an output")] == ["a", "c"]


def test_a_folder_has_one_writer_which_the_refusal_names(cfg: EvaluateConfig) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            run_evaluation(cfg, Judge(), answerer=by(Chat(stuck_at="answer v1", said=os.fdopen(writer, "w"))))  # type: ignore[arg-type]
        finally:
            os._exit(0)
    os.close(writer)
    try:
        with os.fdopen(reader) as lines:
            while lines.readline().strip() != "answer v1":
                pass
        path = Path(cfg.out) / "predictions.jsonl"
        before = path.read_bytes(), path.stat().st_ino
        for again in (cfg, replace(cfg, overwrite=True)):
            with pytest.raises(ConfigError, match=rf"^process {pid} on \S+ is at work in {cfg.out}; wait"):
                run_evaluation(again, Judge(), answerer=by(Chat()))
        assert (path.read_bytes(), path.stat().st_ino) == before
        assert before[0].count(b"\n") == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left = Path(cfg.out) / ".config.yaml.0a1b2c3d.tmp"
    left.write_text("half")
    assert run_evaluation(cfg, Judge(), answerer=by(Chat()))["resumed"] == 2
    assert not left.exists()


@pytest.mark.slow
def test_script_prints_table_and_report(local: EvaluateConfig) -> None:
    arguments = ["--states", local.states, "--model", "nano-untrained", "--out", local.out, "--max_new_tokens", "4"]
    script = ROOT / "scripts" / "evaluate.py"
    status, said, complaints = run_script(script, "--config", ROOT / "configs" / "evaluate.yaml", *arguments)
    assert status == 0, complaints
    lines = said.splitlines()
    assert lines[0].startswith("format")
    assert lines[-1] == f"report: {Path(local.out) / 'report.html'}"
    judge = json.loads((Path(local.out) / "report.json").read_text())["identity"]["judge"]
    assert judge.startswith("offline")
    assert f"{judge} (a rule, not a model)" in (Path(local.out) / "report.html").read_text()
    status, _, complaints = run_script(script, *arguments, "--level", "x1")
    assert status == 2
    assert complaints.splitlines()[-1].startswith("error: ")
    assert "differs in level" in complaints
