"""The whole evaluation: what is asked, scored, kept, asked again and shown; folders of a run; several processes."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import Forked
from scripted_answers import RIGHT, Chat, Judge, by, rows

from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import read_json
from remind.core.processes import Shard
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import run_evaluation
from remind.evaluation.tables import table
from remind.evaluation.team import Team
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Reply
from remind.models.backbone import load_backbone
from remind.models.generate import generate
from remind.models.nano import save_nano
from remind.states.dataset import iterate_states
from remind.states.records import StateRecord


def test_requests_scores_and_files(cfg: EvaluateConfig, six: list[StateRecord]) -> None:
    replies: dict[str, Reply | str] = {
        "v1": "<answer>B</answer><explanation>[0]</explanation>",
        "m2": Reply("", failure="too_long", message="no room"),
        "m1": " ",
    }
    chat = Chat(replies=RIGHT | replies)
    report = run_evaluation(replace(cfg, level="x1"), Judge(), answerer=by(chat))
    assert {r.sample: [(m.role, m.text) for m in r.messages] for r in chat.requests} == {
        record.question_id: [("user", record.x1.text)] for record in six if record.split == "test"
    }
    names = {".lock", "config.yaml", "predictions.jsonl", "report.html", "report.json", "run.json"}
    assert {path.name for path in Path(cfg.out).iterdir()} == names
    assert (report["overall"]["accuracy"]["value"], report["overall"]["accuracy"]["n"]) == (pytest.approx(3 / 6), 6)
    assert (report["identity"]["model"], report["identity"]["judge"]) == ("chat@test", "equal")
    assert (report["counts"]["answered"], report["counts"]["empty"]) == (5, 1)
    found = rows(cfg)
    assert [row["accuracy"] for row in found.values()] == [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    assert (list(found), found["s1"]["memory_recall_text"]) == (["s1", "m1", "v1", "d1", "d2", "m2"], 0.5)


def test_nano_answers_as_generate_does_and_goes_on_where_it_was(local: EvaluateConfig) -> None:
    whole = run_evaluation(local, Judge())
    prompts = [record.x0.text for record in iterate_states(local.states, "test")]
    expected = generate(load_backbone("nano-untrained"), prompts, 6, 2)
    assert [row["text"] for row in rows(local).values()] == [output.text for output in expected if output]
    path = Path(local.out) / "predictions.jsonl"
    final = path.read_bytes()
    lines = final.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:4]) + lines[4][: len(lines[4]) // 2])
    again = run_evaluation(local, Judge())
    assert (again["resumed"], again["overall"], path.read_bytes()) == (4, whole["overall"], final)


def test_only_passing_failures_other_prompts_and_other_judges_are_asked_again(cfg: EvaluateConfig) -> None:
    failing = {name: Reply("", failure=why) for name, why in (("s1", "server"), ("m1", "refused"), ("v1", "too_long"))}
    first = run_evaluation(cfg, Judge(fails=("hiking",)), answerer=by(Chat(replies=RIGHT | failing)))
    assert first["counts"]["failures"] == {"judge": 1, "refused": 1, "server": 1, "too_long": 1}
    assert (first["overall"]["failed"], first["overall"]["no_verdict"]) == (2, 2)
    chat, judge = Chat(), Judge()
    report = run_evaluation(cfg, judge, answerer=by(chat))
    assert (chat.ids, judge.asked) == (["s1", "m1"], ["hiking", "No information available"])
    assert (report["counts"]["failures"], report["resumed"]) == ({"too_long": 1}, 4)
    chat, path = Chat(), Path(cfg.out) / "predictions.jsonl"
    path.write_text(path.read_text().replace(rows(cfg)["v1"]["prompt"], "0" * 16))
    run_evaluation(cfg, judge, answerer=by(chat))
    assert chat.ids == ["v1"]


def test_damaged_rows_name_their_line(cfg: EvaluateConfig) -> None:
    run_evaluation(cfg, Judge(), answerer=by(Chat()))
    path = Path(cfg.out) / "predictions.jsonl"
    good = path.read_text().splitlines()[0]
    path.write_text(f'{good}\n{{"question_id": "s1"}}\n{good}\n')
    with pytest.raises(DataError, match=r"predictions.jsonl \[line 2\]: not .*overwrite"):
        run_evaluation(cfg, Judge(), answerer=by(Chat()))


def test_conditions_lie_side_by_side(cfg: EvaluateConfig) -> None:
    chat, names = Chat(), ["x0", "evidence", "abstain", "always_a"]
    report = run_evaluation(replace(cfg, conditions=names), Judge(), answerer=by(chat))
    assert len(chat.requests) == 12
    assert report["overall"] == report["conditions"]["x0"]["overall"]
    shown = [report["conditions"][name]["overall"]["accuracy"] for name in names]
    assert [(row["value"], row["n"]) for row in shown] == [(1.0, 6), (1.0, 6), (pytest.approx(1 / 6), 6), (0.25, 4)]
    assert report["conditions"]["always_a"]["counts"]["left_out"] == {"no options": 2}
    # over the four that always_a answers: one right there, all four under x0
    assert report["differences"]["always_a"]["all"]["accuracy"]["value"] == pytest.approx(-0.75)
    # one that comes later costs only itself
    run_evaluation(replace(cfg, conditions=["x0", "x2"]), Judge(), answerer=by(chat))
    assert len(chat.requests) == 12 + 6
    assert "because" in chat.requests[-1].messages[0].text


def test_a_dry_run_asks_nothing_and_leaves_nothing(cfg: EvaluateConfig, tmp_path: Path) -> None:
    endpoint, dry = EndpointConfig("m", "http://127.0.0.1:9/v1"), tmp_path / "dry.jsonl"
    asked = replace(cfg, llm=LLMConfig(default=endpoint, dry_run=str(dry), cache=None), judge="llm", limit=3)
    stages = run_evaluation(asked)["dry_run"]["stages"]
    assert {name: row["requests"] for name, row in stages.items()} == {"answer": 3, "judge": 1}
    assert len(dry.read_text().splitlines()) == 4
    assert not Path(cfg.out).exists()


def test_answers_that_nobody_has_a_gold_for_are_shown(cfg: EvaluateConfig, make_record: Any, write_states: Any) -> None:
    asked = [make_record("a", answers=()), make_record("b", answers=(), format="single", options=("red", "blue"))]
    cfg = replace(cfg, states=str(write_states(*asked, name="own")), conditions=["x0", "abstain"])
    replies: dict[str, Reply | str] = {"a": "<answer>Bergen</answer>", "b": Reply("", failure="too_long")}
    report = run_evaluation(cfg, Judge(), answerer=by(Chat(replies=replies)))
    told = ["a: why?", "  x0: Bergen", "  abstain: No information available", "b: why?", "  x0: too_long"]
    assert "\n".join(told) in table(report)


def test_another_runs_folder_is_refused_unless_overwrite(local: EvaluateConfig, tmp_path: Path) -> None:
    cfg = replace(local, max_new_tokens=1)
    run_evaluation(cfg, Judge())
    before = {path.name: path.read_bytes() for path in Path(cfg.out).iterdir()}
    other, same = (str(save_nano(tmp_path / name, seed=seed)) for name, seed in (("other", 1), ("same", 0)))
    with pytest.raises(ConfigError, match="differs in level, max_new_tokens, model; choose another out"):
        run_evaluation(replace(cfg, level="x1", max_new_tokens=7, model=other), Judge())
    assert {path.name: path.read_bytes() for path in Path(cfg.out).iterdir()} == before
    # the same weights from a folder are the same model
    assert run_evaluation(replace(cfg, model=same, batch_size=5), Judge())["resumed"] == 6
    assert run_evaluation(replace(cfg, level="x1", overwrite=True), Judge())["resumed"] == 0
    # files of something else
    with pytest.raises(ConfigError, match="something else"):
        run_evaluation(replace(cfg, out=other), Judge())


def test_states_models_and_settings_that_do_not_serve(cfg: EvaluateConfig, make_record: Any, write_states: Any) -> None:
    def refused(error: type[Exception], message: str, replies: Any = RIGHT, **changes: Any) -> None:
        answerer = by(Chat(replies=replies)) if replies else None
        with pytest.raises(error, match=rf"^[^\n]*{message}[^\n]*$"):
            run_evaluation(replace(cfg, overwrite=True, **changes), answerer=answerer)

    refused(DataError, r"no questions of split 'dev' \(there are: test, train\)", split="dev")
    refused(ModelError, "does/not/exist", None, answers="local", model="does/not/exist")
    refused(ConfigError, r"no endpoint for stage answer; set llm.answer", None)
    shared = write_states(make_record("a"), replace(make_record("b", split="train"), dialogue_id="d-a"), name="shared")
    refused(DataError, "evidence of training question b too", states=str(shared))
    silent = dict.fromkeys(RIGHT, Reply("", failure="server", message="no memory"))
    refused(ModelError, "none of 6 questions: no memory", silent)


def test_the_page_finds_answers_by_outcome_and_words(cfg: EvaluateConfig, browser: Any) -> None:
    wrong = dict.fromkeys(("s1", "m1"), "<answer>C</answer>")
    report = run_evaluation(replace(cfg, conditions=["x0", "x1"]), Judge(), answerer=by(Chat(RIGHT | wrong)))
    heads = ["condition", "x0", "x1", "condition", "x0", "x1", "dimension", "belief", "personalized", "mean"]
    assert [line.split()[0] for line in table(report).splitlines() if line] == heads
    page = browser.new_page()
    page.goto((Path(cfg.out) / "report.html").as_uri())
    page.locator("select").select_option("wrong-0")
    assert page.locator("article:visible").count() == 2
    page.locator("select").select_option("")
    page.fill("#find", "belief modeling")
    assert page.locator("#found").inner_text() == "2 of 6"
    page.close()


#: As scripts/evaluate.py, but the first time process 1 is killed at its second row.
SCRIPT = """
import os, signal
from pathlib import Path
from remind.commands import run
from remind.evaluation import run as stages

row, rows, killed = stages.Task.row, [], Path({killed!r})

def second(*given):
    rows.append(given)
    if os.environ["RANK"] == "1" and len(rows) == 2 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return row(*given)

stages.Task.row = second
run("evaluate", ["--config", {asked!r}])
"""


@pytest.fixture
def dealt(local: EvaluateConfig, six: list[StateRecord], make_record: Any, write_states: Any) -> EvaluateConfig:
    """Six questions in three batches, of which process 1 has the second, and one whose prompt is too long."""
    states = str(write_states(*six, make_record("long", text="why? " * 20_000), name="more"))
    return replace(local, states=states, conditions=["x0", "x1", "abstain"])


def timeless(value: Any) -> Any:
    """A report without its times, its own folder, its sittings and its threads."""
    if isinstance(value, dict):
        return {
            key: timeless(item) for key, item in value.items() if key not in ("seconds", "out", "machine", "resumed")
        }
    return value


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(dealt: EvaluateConfig, tmp_path: Path) -> None:
    asked, script, environment = tmp_path / "asked.yaml", tmp_path / "script.py", {**os.environ, "OMP_NUM_THREADS": "1"}
    asked.write_text(yaml.safe_dump({**asdict(dealt), "out": str(tmp_path / "two")}))
    script.write_text(SCRIPT.format(asked=str(asked), killed=str(tmp_path / "killed")))
    run_evaluation(dealt)
    process = Forked(script, environment=environment, processes=2)
    _, errors = process.communicate(timeout=120)
    assert "error: a process of this run has died" in errors
    # what it had answered is not asked again
    assert list((tmp_path / "two").rglob("*.part"))
    process = Forked(script, environment=environment, processes=2)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert said.count("report: ") == 1
    for name in dealt.conditions:
        one, two = Path(dealt.out) / name, tmp_path / "two" / name
        assert sorted(file.name for file in one.iterdir()) == sorted(file.name for file in two.iterdir())
        assert (one / "predictions.jsonl").read_bytes() == (two / "predictions.jsonl").read_bytes()
        report = read_json(two / "report.json")
        assert timeless(read_json(one / "report.json")) == timeless(report)
        assert (report["resumed"] > 0) == (name == "x0")


def test_several_processes_need_a_local_model(dealt: EvaluateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("remind.evaluation.run.join", lambda: Team(Shard(0, 2)))
    with pytest.raises(ConfigError, match=r"only questions to a local model .* start one process"):
        run_evaluation(replace(dealt, answers="server"))
