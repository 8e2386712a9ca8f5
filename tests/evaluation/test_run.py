"""The whole evaluation: scores and files, resuming, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process import run_script

from remind.core.errors import ConfigError, DataError, FormatError, ModelError, RemindError
from remind.evaluation import answerers
from remind.evaluation.conditions import load_questions
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import evaluate
from remind.models.generate import Generation, generate
from remind.models.load import load_backbone
from remind.models.nano import save_nano
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.parquet import StateRecord

ROOT = Path(__file__).parents[2]
RAW = ("question_id", "text", "prompt_tokens", "new_tokens", "finished", "failure", "message")


@pytest.fixture
def cfg(tmp_path: Path, six: list[StateRecord], write_states: Callable[..., Path]) -> EvaluateConfig:
    return EvaluateConfig(
        states=str(write_states(*six)),
        model="nano-untrained",
        out=str(tmp_path / "out"),
        max_new_tokens=6,
        batch_size=2,
        bootstrap=20,
    )


def predictions(cfg: EvaluateConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(cfg.out) / "predictions.jsonl").read_text().splitlines()]


def pretend(monkeypatch: pytest.MonkeyPatch, outputs: dict[int, Generation]) -> list[int]:
    """Replace generation by fixed outputs per position; returns the positions asked for."""
    asked: list[int] = []

    def fake(
        backbone: object,
        prompts: Sequence[str],
        max_new_tokens: int,
        batch_size: int,
        done: Sequence[bool],
        on_output: Callable[[int, Generation], None],
    ) -> list[Generation | None]:
        result: list[Generation | None] = [None] * len(prompts)
        for index, skip in enumerate(done):
            if not skip:
                asked.append(index)
                result[index] = outputs[index]
                on_output(index, outputs[index])
        return result

    monkeypatch.setattr(answerers, "generate", fake)
    return asked


def said(text: str) -> Generation:
    return Generation(text, 10, 3, True)


SIX = {
    0: said("<answer>B</answer><explanation>Ana: s1 line 1\nAna: s1 line 5</explanation>"),
    1: said("<answer>[A,D]</answer><explanation>Ana: something else</explanation>"),
    2: said("<answer>B</answer><explanation>[0]</explanation>"),
    3: said("<answer>hiking</answer><explanation></explanation>"),
    4: said("<answer>No information available</answer><explanation></explanation>"),
    5: Generation("", 99999, failure="too_long", message="too many"),
}


def test_scores_and_files(cfg: EvaluateConfig, judge: AuxiliaryLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, SIX)
    report = evaluate(cfg, judge)
    out = Path(cfg.out)
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(report))
    assert report["counts"]["questions"] == 6
    assert report["counts"]["failures"] == {"too_long": 1}
    assert (report["overall"]["accuracy"]["value"], report["overall"]["accuracy"]["n"]) == (pytest.approx(4 / 5), 5)
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
    text = {row["question_id"]: row["memory_recall_text"] for row in predictions(cfg)}
    assert text["s1"] == pytest.approx(1.0, abs=1e-6)
    assert text["m1"] == 0.0
    assert report["identity"]["judge"] == "same-words"
    assert report["states"]["inputs"] == {"made.json": "0" * 64}
    assert yaml.safe_load((out / "config.yaml").read_text())["model"] == "nano-untrained"
    page = (out / "report.html").read_text()
    assert "same-words" in page
    assert "v1 line" not in page
    assert "image 1" in page
    assert not list(out.glob(".*"))
    assert [row["question_id"] for row in predictions(cfg)] == ["s1", "m1", "v1", "d1", "d2", "m2"]
    assert [row["accuracy"] for row in predictions(cfg)] == [1.0, 1.0, 0.0, 1.0, 1.0, None]


def test_nano_answers_every_question_of_the_split(cfg: EvaluateConfig, judge: AuxiliaryLLM) -> None:
    report = evaluate(cfg, judge)
    assert report["counts"]["answered"] == 6
    assert report["counts"]["cut_off"] == 6
    prompts = load_questions(cfg.states, "test", ["x0"]).prompts["x0"]
    expected = generate(load_backbone("nano-untrained"), [prompt.text for prompt in prompts], 6, 2)
    assert [row["text"] for row in predictions(cfg)] == [output.text for output in expected if output]


@pytest.mark.parametrize("kept", [0, 4])
def test_resumes_after_a_kill(
    cfg: EvaluateConfig, judge: AuxiliaryLLM, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    whole = evaluate(cfg, judge)
    path = Path(cfg.out) / "predictions.jsonl"
    final = path.read_bytes()
    raw = [json.dumps({key: row[key] for key in RAW}).encode() + b"\n" for row in predictions(cfg)]
    path.write_bytes(b"".join(raw[:kept]) + raw[kept][: len(raw[kept]) // 2])
    for name in ("report.json", "report.html"):
        (Path(cfg.out) / name).unlink()

    tried: list[int] = []

    def watched(*args: Any) -> Any:
        *front, done, on_output = args

        def keep(index: int, output: Generation) -> None:
            tried.append(index)
            on_output(index, output)

        return generate(*front, done, keep)

    monkeypatch.setattr(answerers, "generate", watched)
    again = evaluate(replace(cfg, batch_size=2), judge)
    assert sorted(tried) == list(range(kept, 6))
    assert again["resumed"] == kept
    assert path.read_bytes() == final
    assert again["overall"] == whole["overall"]
    tried.clear()
    assert evaluate(cfg, judge)["resumed"] == 6
    assert tried == []


def test_a_model_that_answers_nothing_is_an_error(
    cfg: EvaluateConfig, judge: AuxiliaryLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, {index: Generation("", 1, failure="error", message="no memory") for index in range(6)})
    with pytest.raises(ModelError, match="none of 6 questions: no memory"):
        evaluate(cfg, judge)


def test_another_runs_folder_is_refused_unless_overwrite(
    cfg: EvaluateConfig, judge: AuxiliaryLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = pretend(monkeypatch, SIX)
    evaluate(cfg, judge)
    asked.clear()
    before = {path.name: path.read_bytes() for path in Path(cfg.out).iterdir()}
    with pytest.raises(ConfigError, match=r"differs in level, max_new_tokens; choose another out"):
        evaluate(replace(cfg, level="x1", max_new_tokens=7), judge)
    other = str(save_nano(tmp_path / "other", seed=1))
    with pytest.raises(ConfigError, match="differs in model;"):
        evaluate(replace(cfg, model=other), judge)
    assert {path.name: path.read_bytes() for path in Path(cfg.out).iterdir()} == before
    assert asked == []
    # the same weights from a folder are the same model
    assert evaluate(replace(cfg, model=str(save_nano(tmp_path / "same")), batch_size=5), judge)["resumed"] == 6
    assert evaluate(replace(cfg, level="x1", overwrite=True), judge)["resumed"] == 0
    assert len(asked) == 6


def test_a_folder_of_something_else_is_refused(cfg: EvaluateConfig, judge: AuxiliaryLLM) -> None:
    Path(cfg.out).mkdir()
    (Path(cfg.out) / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        evaluate(cfg, judge)
    with pytest.raises(ConfigError, match="is a file"):
        evaluate(replace(cfg, out=str(Path(cfg.out) / "thesis.tex")), judge)
    (Path(cfg.out) / "run.json").write_text('{"format": "else"}')
    with pytest.raises(DataError, match="not the identity"):
        evaluate(cfg, judge)
    assert (Path(cfg.out) / "thesis.tex").read_text() == "mine"


@pytest.mark.parametrize("line", ["{]", "[]", '{"question_id": "s1"}', '{"question_id": 1}', "\\xff"])
def test_damaged_predictions_name_their_line(
    cfg: EvaluateConfig, judge: AuxiliaryLLM, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    pretend(monkeypatch, SIX)
    evaluate(cfg, judge)
    path = Path(cfg.out) / "predictions.jsonl"
    good = path.read_text().splitlines()[0]
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError, match=r"predictions.jsonl \[line 2\]: .*overwrite"):
        evaluate(cfg, judge)


def test_limit_spreads_over_the_split(cfg: EvaluateConfig) -> None:
    for limit, ids in ((3, ["s1", "v1", "d2"]), (99, ["s1", "m1", "v1", "d1", "d2", "m2"])):
        assert [r.question_id for r in load_questions(cfg.states, "test", ["x0"], limit=limit).records] == ids


def test_states_that_do_not_serve(
    cfg: EvaluateConfig,
    judge: AuxiliaryLLM,
    tmp_path: Path,
    make_record: Callable[..., StateRecord],
    write_states: Callable[..., Path],
) -> None:
    with pytest.raises(DataError, match=r"no states of split 'dev' \(there are: test, train\)"):
        evaluate(replace(cfg, split="dev"), judge)
    with pytest.raises(FormatError, match="no manifest"):
        evaluate(replace(cfg, states=str(tmp_path / "nowhere")), judge)
    twice = write_states(make_record("q"), make_record("q"), name="twice")
    with pytest.raises(DataError, match=r"\[q\]: this question id occurs twice"):
        load_questions(twice, "test", ["x0"])
    shared = write_states(make_record("a"), replace(make_record("b", split="train"), dialogue_id="d-a"), name="shared")
    with pytest.raises(DataError, match="evidence of training question b too"):
        load_questions(shared, "test", ["x0"])
    assert not Path(cfg.out).exists()


@pytest.mark.parametrize("model", ["does/not/exist", "minilm"])
def test_models_that_do_not_serve(cfg: EvaluateConfig, judge: AuxiliaryLLM, model: str) -> None:
    with pytest.raises(ModelError) as caught:
        evaluate(replace(cfg, model=model), judge)
    assert model in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not Path(cfg.out).exists()


def test_bad_settings(cfg: EvaluateConfig) -> None:
    for name in ("max_new_tokens", "batch_size", "bootstrap", "limit"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
            replace(cfg, **{name: 0})
    with pytest.raises(RemindError, match="no judge 'gpt'"):
        evaluate(replace(cfg, judge="gpt"))  # type: ignore[arg-type]
    assert not Path(cfg.out).exists()


@pytest.mark.slow
def test_script_prints_table_and_report(cfg: EvaluateConfig) -> None:
    arguments = ["--states", cfg.states, "--model", "nano-untrained", "--out", cfg.out, "--max_new_tokens", "4"]
    script = ROOT / "scripts" / "evaluate.py"
    status, said, complaints = run_script(script, "--config", ROOT / "configs" / "evaluate.yaml", *arguments)
    assert status == 0, complaints
    lines = said.splitlines()
    assert lines[0].startswith("format")
    assert lines[-1] == f"report: {Path(cfg.out) / 'report.html'}"
    judge = json.loads((Path(cfg.out) / "report.json").read_text())["identity"]["judge"]
    assert judge.startswith("offline")
    assert f"{judge} (a rule, not a model)" in (Path(cfg.out) / "report.md").read_text().replace("\\", "")
    status, _, complaints = run_script(script, *arguments, "--level", "x1")
    assert status == 2
    assert complaints.splitlines()[-1].startswith("error: ")
    assert "differs in level" in complaints
