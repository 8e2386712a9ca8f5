"""The whole evaluation: what is asked, scored, kept and asked again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripted_answers import RIGHT, Chat, Judge, by, rows

from remind.core.errors import ConfigError, DataError
from remind.evaluation import answerers
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import run_evaluation
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Reply
from remind.models.backbone import load_backbone
from remind.models.generate import Generation, generate
from remind.states.dataset import iterate_states, load_states
from remind.states.records import StateRecord

ROOT = Path(__file__).parents[2]


def test_requests_scores_and_files(cfg: EvaluateConfig, six: list[StateRecord]) -> None:
    chat = Chat(
        {**RIGHT, "v1": "<answer>B</answer><explanation>[0]</explanation>", "m2": Reply("", failure="too_long")}
    )
    report = run_evaluation(replace(cfg, level="x1"), Judge(), answerer=by(chat))
    assert {r.sample: [(m.role, m.text) for m in r.messages] for r in chat.asked} == {
        record.question_id: [("user", record.x1.text)] for record in six if record.split == "test"
    }
    assert {(r.stage, r.temperature, r.max_tokens) for r in chat.asked} == {("answer", 0.0, 6)}
    out = Path(cfg.out)
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    assert (report["overall"]["accuracy"]["value"], report["overall"]["accuracy"]["n"]) == (pytest.approx(4 / 6), 6)
    assert {name: (row["n"], row["failed"]) for name, row in report["by_format"].items()} == {
        "single": (2, 0),
        "multi": (2, 1),
        "direct": (2, 0),
    }
    assert report["by_format"]["direct"]["f1"]["value"] == 1.0
    assert set(report["by_category"]) == {"4", "5"}
    assert report["by_category"]["5"]["locomo_f1"]["value"] == 1.0
    assert report["by_category"]["5"]["evidence_recall"] is None
    assert report["by_dimension"]["personalized_visual_baselines"]["memory_recall_visual"]["value"] == 0.5
    product = report["by_dimension_and_format"]
    assert {name: list(cells) for name, cells in product.items()} == {
        "belief_modeling": ["single", "multi"],
        "personalized_visual_baselines": ["single"],
    }
    assert product["personalized_visual_baselines"]["single"]["memory_recall"]["value"] == 0.5
    assert (report["identity"]["model"], report["identity"]["judge"]) == ("chat@test", "equal")
    assert (report["counts"]["prompt_tokens"], report["counts"]["new_tokens"]) == (45, 20)
    assert report["states"]["inputs"] == {"made.json": "0" * 64}
    # nothing in the manifest: built before kinds could be inferred
    assert report["states"]["kind"] == "gold"
    assert yaml.safe_load((out / "config.yaml").read_text())["model"] == "a name"
    page = (out / "report.html").read_text()
    assert "equal" in page
    assert "kind of question: its gold dimension" in page
    assert "v1 line" not in page
    assert "image 1" in page
    assert sorted(path.name for path in out.iterdir()) == [
        *(".lock", "config.yaml", "predictions.jsonl", "report.html", "report.json", "run.json")
    ]
    found = rows(cfg)
    assert [row["accuracy"] for row in found.values()] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert (list(found), found["s1"]["memory_recall_text"]) == (["s1", "m1", "v1", "d1", "d2", "m2"], 0.5)


def test_a_dataset_takes_the_place_of_the_folder(cfg: EvaluateConfig) -> None:
    states = load_states(cfg.states)
    for name, data in (("all", states), ("direct", states["test"].filter(lambda row: row["format"] == "direct"))):
        report = run_evaluation(
            replace(cfg, out=f"{cfg.out}-{name}", states="nowhere"), Judge(), answerer=by(Chat(RIGHT)), data=data
        )
        assert report["counts"]["questions"] == {"all": 6, "direct": 2}[name]
        assert report["by_format"]["direct"]["accuracy"]["value"] == 1.0


def test_empty_answers_are_counted_and_told(cfg: EvaluateConfig, capsys: pytest.CaptureFixture[str]) -> None:
    report = run_evaluation(
        cfg, Judge(), answerer=by(Chat({**RIGHT, "m1": " ", "d1": "", "m2": Reply("", failure="too_long")}))
    )
    assert (report["counts"]["answered"], report["counts"]["empty"]) == (5, 2)
    assert "warning: 2 of 5 answers are empty" in capsys.readouterr().err
    assert "5 answered, 2 of them with empty text." in (Path(cfg.out) / "report.html").read_text()


def test_nano_answers_as_generate_does_and_resumes_after_a_kill(
    local: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_evaluation(local, Judge())
    assert (whole["counts"]["answered"], whole["counts"]["cut_off"]) == (6, 6)
    prompts = [record.x0.text for record in iterate_states(local.states, "test")]
    expected = generate(load_backbone("nano-untrained"), prompts, 6, 2)
    assert [row["text"] for row in rows(local).values()] == [output.text for output in expected if output]

    path = Path(local.out) / "predictions.jsonl"
    final = path.read_bytes()
    lines = final.splitlines(keepends=True)
    tried: list[int] = []

    def watched(*args: Any) -> Any:
        *front, done, on_output, shard, pictures = args

        def keep(index: int, output: Generation) -> None:
            tried.append(index)
            on_output(index, output)

        return generate(*front, done, keep, shard, pictures)

    monkeypatch.setattr(answerers, "generate", watched)
    for kept in (0, 4, 6):
        path.write_bytes(b"".join(lines[:kept]) + (lines[kept][: len(lines[kept]) // 2] if kept < 6 else b""))
        (Path(local.out) / "report.json").unlink()
        tried.clear()
        again = run_evaluation(local, Judge())
        assert sorted(tried) == list(range(kept, 6))
        assert again["resumed"] == kept
        assert path.read_bytes() == final
        assert again["overall"] == whole["overall"]


def test_failures_are_told_by_kind_and_those_of_the_model_are_wrong(cfg: EvaluateConfig) -> None:
    replies: dict[str, Reply | str] = {
        "s1": Reply("", failure="too_long", message="no room"),
        "m1": Reply("", failure="server", message="503"),
        "v1": "I would rather not say.",
        "d1": "<answer>swimming</answer>",
        "d2": "<answer>maybe</answer>",
        "m2": "<answer>[A]</answer>",
    }
    report = run_evaluation(cfg, Judge(("maybe",)), answerer=by(Chat(replies)))
    counts, overall = report["counts"], report["overall"]
    assert counts["failures"] == {"judge": 1, "server": 1, "too_long": 1, "unparsable": 1}
    assert counts["judge_failures"] == {"neither": 1}
    # too_long, unparsable, swimming, [A]; server and judge have no verdict
    assert (overall["accuracy"]["value"], overall["accuracy"]["n"]) == (0.0, 4)
    assert (overall["parse_rate"]["value"], overall["parse_rate"]["n"]) == (pytest.approx(3 / 5), 5)
    assert (overall["failed"], overall["no_verdict"]) == (2, 2)
    page = (Path(cfg.out) / "report.html").read_text()
    for words in ("no room", "503", "I would rather not say.", "Failures by kind", "2 have no verdict"):
        assert words in page
    assert {key: rows(cfg)[key]["accuracy"] for key in ("d1", "d2")} == {"d1": 0.0, "d2": None}


def test_bad_replies_are_defined_and_counted(cfg: EvaluateConfig) -> None:
    replies: dict[str, Reply | str] = {
        "s1": "<answer>B</answer>\ud800",
        "m1": "<answer>{ }</answer>",
        "v1": "<answer>Z</answer> or <answer>A</answer>",
        "d1": "hiking",
        "d2": "",
        "m2": "<answer></answer>",
    }
    report = run_evaluation(cfg, Judge(), answerer=by(Chat(replies)))
    assert {name: (row["accuracy"], row["score_failure"]) for name, row in rows(cfg).items()} == {
        "s1": (1.0, None),
        "m1": (0.0, None),
        "v1": (0.0, None),
        "d1": (1.0, None),
        "d2": (0.0, "unparsable"),
        "m2": (0.0, "unparsable"),
    }
    assert report["counts"]["problems"] == {
        "no explanation tag": 6,
        "no answer tag": 2,
        "empty answer": 2,
        "empty option set": 1,
        "several answer tags": 1,
        "letters that name no option": 1,
        "no option letter": 1,
    }


def test_only_passing_failures_other_prompts_and_other_judges_are_asked_again(cfg: EvaluateConfig) -> None:
    failing = {name: Reply("", failure=why) for name, why in (("s1", "server"), ("m1", "refused"), ("v1", "too_long"))}
    first = run_evaluation(cfg, Judge(("hiking",)), answerer=by(Chat({**RIGHT, **failing})))
    assert first["counts"]["failures"]["judge"] == 1
    chat, judge = Chat(), Judge()
    report = run_evaluation(cfg, judge, answerer=by(chat))
    assert (chat.ids, judge.asked) == (["s1", "m1"], ["hiking", "No information available"])
    assert (report["counts"]["failures"], report["resumed"]) == ({"too_long": 1}, 4)
    chat, judge = Chat(), Judge(name="other")
    report = run_evaluation(cfg, judge, answerer=by(chat))
    assert (chat.ids, len(judge.asked), report["identity"]["judge"]) == ([], 2, "other")
    path = Path(cfg.out) / "predictions.jsonl"
    path.write_text(path.read_text().replace(rows(cfg)["v1"]["prompt"], "0" * 16))
    chat = Chat()
    run_evaluation(cfg, judge, answerer=by(chat))
    assert chat.ids == ["v1"]


@pytest.mark.parametrize("line", ["{]", "[]", '{"question_id": "s1"}', '{"question_id": 1}', "\\xff"])
def test_damaged_rows_name_their_line(cfg: EvaluateConfig, line: str) -> None:
    run_evaluation(cfg, Judge(), answerer=by(Chat()))
    path = Path(cfg.out) / "predictions.jsonl"
    good = path.read_text().splitlines()[0]
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError, match=r"predictions.jsonl \[line 2\]: not .*overwrite"):
        run_evaluation(cfg, Judge(), answerer=by(Chat()))


def test_conditions_lie_side_by_side(cfg: EvaluateConfig) -> None:
    chat = Chat()
    report = run_evaluation(
        replace(cfg, conditions=["x0", "evidence", "abstain", "always_a"]), Judge(), answerer=by(chat)
    )
    assert len(chat.asked) == 12
    assert list(report["conditions"]) == ["x0", "evidence", "abstain", "always_a"]
    assert report["reference"] == "x0"
    assert report["overall"] == report["conditions"]["x0"]["overall"]
    shown = {name: part["overall"]["accuracy"] for name, part in report["conditions"].items()}
    assert {name: (row["value"], row["n"]) for name, row in shown.items()} == {
        "x0": (1.0, 6),
        "evidence": (1.0, 6),
        "abstain": (pytest.approx(1 / 6), 6),
        "always_a": (0.25, 4),
    }
    assert report["conditions"]["always_a"]["counts"]["left_out"] == {"no options": 2}
    gain = report["differences"]["abstain"]["all"]["accuracy"]
    assert (gain["value"], gain["n"]) == (pytest.approx(1 / 6 - 1), 6)
    assert gain["low"] <= gain["value"] <= gain["high"] <= 0
    # over the four that always_a answers: one right there, all four under x0
    assert report["differences"]["always_a"]["all"]["accuracy"]["value"] == pytest.approx(-0.75)
    assert report["differences"]["evidence"]["direct"]["accuracy"]["value"] == 0.0
    own = json.loads((Path(cfg.out) / "abstain" / "report.json").read_text())
    assert own["overall"]["accuracy"]["value"] == pytest.approx(1 / 6)
    assert own["identity"]["level"] == "abstain"
    page = (Path(cfg.out) / "report.html").read_text()
    assert "-83.3" in page
    assert "Conditions side by side" in page
    # one that comes later costs only itself
    chat = Chat()
    report = run_evaluation(replace(cfg, conditions=["x0", "evidence", "x2"]), Judge(), answerer=by(chat))
    assert len(chat.asked) == 6
    assert "because" in chat.asked[0].messages[0].text
    assert [report["conditions"][name]["resumed"] for name in ("x0", "evidence", "x2")] == [6, 6, 0]
    with pytest.raises(ConfigError, match="differs in"):
        run_evaluation(cfg, Judge(), answerer=by(chat))


def test_a_dry_run_asks_nothing_and_leaves_nothing(cfg: EvaluateConfig, tmp_path: Path) -> None:
    llm = LLMConfig(
        default=EndpointConfig("m", "http://127.0.0.1:9/v1"), dry_run=str(tmp_path / "dry.jsonl"), cache=None
    )
    for answers, stages in (("server", {"answer": 6, "judge": 2}), ("local", {"judge": 2})):
        found = run_evaluation(replace(cfg, llm=llm, judge="llm", answers=answers))["dry_run"]  # type: ignore[arg-type]
        assert {name: row["requests"] for name, row in found["stages"].items()} == stages
        assert len((tmp_path / "dry.jsonl").read_text().splitlines()) == sum(stages.values())
        assert not Path(cfg.out).exists()
