"""The whole evaluation: what is asked, scored, kept, asked again, refused, and told apart."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from in_process import run_script

from remind.core.errors import ConfigError, DataError, FormatError, ModelError
from remind.evaluation import answerers
from remind.evaluation.conditions import load_questions
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.predictions import appending, read_rows
from remind.evaluation.run import evaluate
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Reply, Request
from remind.models.generate import Generation, generate
from remind.models.load import load_backbone
from remind.models.nano import save_nano
from remind.states.parquet import StateRecord

ROOT = Path(__file__).parents[2]
RIGHT: dict[str, Reply | str] = {
    "s1": "<answer>B</answer><explanation>Ana: s1 line 1</explanation>",
    "m1": "<answer>[A,D]</answer><explanation></explanation>",
    "v1": "<answer>A</answer><explanation>[0]</explanation>",
    "d1": "<answer>hiking</answer><explanation></explanation>",
    "d2": "<answer>No information available</answer><explanation></explanation>",
    "m2": "<answer>[C]</answer><explanation></explanation>",
}


@dataclass
class Chat:
    """A chat model with a reply for every question id; never answers `stuck_at`."""

    replies: dict[str, Reply | str] = field(default_factory=lambda: RIGHT)
    name: str = "chat@test"
    asked: list[Request] = field(default_factory=list)
    stuck_at: str = ""
    said: Any = None

    def complete(self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None]) -> list[Reply]:
        for n, request in enumerate(requests):
            self.asked.append(request)
            _say(self, f"answer {request.sample}")
            given = self.replies[request.sample]
            reply = given if isinstance(given, Reply) else Reply(given, prompt_tokens=9, completion_tokens=4, calls=1)
            on_reply(n, reply)
        return []

    @property
    def ids(self) -> list[str]:
        return [request.sample for request in self.asked]


@dataclass
class Judge:
    """Accepts an answer that equals a reference; gives no verdict on those in `fails`."""

    fails: tuple[str, ...] = ()
    name: str = "equal"
    asked: list[str] = field(default_factory=list)
    stuck_at: str = ""
    said: Any = None

    def judge(self, question: str, references: Sequence[str], prediction: str) -> Any:
        self.asked.append(prediction)
        _say(self, f"judge {prediction}")
        return "perhaps" if prediction in self.fails else prediction in references


def _say(model: Chat | Judge, words: str) -> None:
    if model.said is not None:
        print(words, file=model.said, flush=True)
    if words == model.stuck_at:
        time.sleep(600)


@pytest.fixture
def local(tmp_path: Path, six: list[StateRecord], write_states: Callable[..., Path]) -> EvaluateConfig:
    return EvaluateConfig(
        states=str(write_states(*six)),
        model="nano-untrained",
        out=str(tmp_path / "out"),
        max_new_tokens=6,
        batch_size=2,
        bootstrap=20,
    )


@pytest.fixture
def cfg(local: EvaluateConfig) -> EvaluateConfig:
    return replace(local, answers="server", model="a name")


def rows(cfg: EvaluateConfig, name: str = "predictions.jsonl") -> dict[str, dict[str, Any]]:
    lines = (Path(cfg.out) / name).read_text().splitlines()
    return {row["question_id"]: row for row in map(json.loads, lines)}


def test_requests_scores_and_files(cfg: EvaluateConfig, six: list[StateRecord]) -> None:
    chat = Chat(
        {**RIGHT, "v1": "<answer>B</answer><explanation>[0]</explanation>", "m2": Reply("", failure="too_long")}
    )
    report = evaluate(replace(cfg, level="x1"), Judge(), chat=chat)
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
        *(".lock", "config.yaml", "predictions.jsonl", "report.html", "report.json", "run.json", "verdicts.jsonl")
    ]
    found = rows(cfg)
    assert [row["accuracy"] for row in found.values()] == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]
    assert (list(found), found["s1"]["memory_recall_text"]) == (["s1", "m1", "v1", "d1", "d2", "m2"], 0.5)


def test_empty_answers_are_counted_and_told(cfg: EvaluateConfig, capsys: pytest.CaptureFixture[str]) -> None:
    report = evaluate(cfg, Judge(), chat=Chat({**RIGHT, "m1": " ", "d1": "", "m2": Reply("", failure="too_long")}))
    assert (report["counts"]["answered"], report["counts"]["empty"]) == (5, 2)
    assert "warning: 2 of 5 answers are empty" in capsys.readouterr().err
    assert "5 answered, 2 of them with empty text." in (Path(cfg.out) / "report.html").read_text()


def test_nano_answers_as_generate_does_and_resumes_after_a_kill(
    local: EvaluateConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = evaluate(local, Judge())
    assert (whole["counts"]["answered"], whole["counts"]["cut_off"]) == (6, 6)
    prompts = load_questions(local.states, "test", ["x0"]).prompts["x0"]
    expected = generate(load_backbone("nano-untrained"), [prompt.text for prompt in prompts], 6, 2)
    assert [row["text"] for row in rows(local).values()] == [output.text for output in expected if output]

    path = Path(local.out) / "predictions.jsonl"
    final = path.read_bytes()
    # rows as they stood before prompts had hashes
    raw = ("question_id", "text", "prompt_tokens", "new_tokens", "finished", "failure", "message")
    lines = [json.dumps({key: row[key] for key in raw}).encode() + b"\n" for row in rows(local).values()]
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
        again = evaluate(local, Judge())
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
    report = evaluate(cfg, Judge(("maybe",)), chat=Chat(replies))
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
    assert {key: (row["judge"], row["verdict"], row["why"]) for key, row in rows(cfg, "verdicts.jsonl").items()} == {
        "d1": ("equal", False, ""),
        "d2": ("equal", None, "neither"),
    }


def test_bad_replies_are_defined_and_counted(cfg: EvaluateConfig) -> None:
    replies: dict[str, Reply | str] = {
        "s1": "<answer>B</answer>\ud800",
        "m1": "<answer>{ }</answer>",
        "v1": "<answer>Z</answer> or <answer>A</answer>",
        "d1": "hiking",
        "d2": "",
        "m2": "<answer></answer>",
    }
    report = evaluate(cfg, Judge(), chat=Chat(replies))
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
    assert report["counts"]["dropped_letters"] == 1


def test_only_passing_failures_other_prompts_and_other_judges_are_asked_again(cfg: EvaluateConfig) -> None:
    failing = {name: Reply("", failure=why) for name, why in (("s1", "server"), ("m1", "refused"), ("v1", "too_long"))}
    first = evaluate(cfg, Judge(("hiking",)), chat=Chat({**RIGHT, **failing}))
    assert first["counts"]["failures"]["judge"] == 1
    chat, judge = Chat(), Judge()
    report = evaluate(cfg, judge, chat=chat)
    assert (chat.ids, judge.asked) == (["s1", "m1"], ["hiking"])
    assert report["counts"]["failures"] == {"too_long": 1}
    assert (report["resumed"], report["verdicts_resumed"]) == (4, 1)
    # a row of an earlier version, which wrote one for questions with options too
    verdicts, old = Path(cfg.out) / "verdicts.jsonl", {"question_id": "s1", "judge": "letters", "case": ""}
    verdicts.write_text(verdicts.read_text() + json.dumps({**old, "verdict": True}) + "\n")
    chat, judge = Chat(), Judge(name="other")
    report = evaluate(cfg, judge, chat=chat)
    assert (chat.ids, len(judge.asked), report["identity"]["judge"]) == ([], 2, "other")
    path = Path(cfg.out) / "predictions.jsonl"
    path.write_text(path.read_text().replace(rows(cfg)["v1"]["prompt"], "0" * 16))
    chat = Chat()
    evaluate(cfg, judge, chat=chat)
    assert chat.ids == ["v1"]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        *(("predictions", line) for line in ("{]", "[]", '{"question_id": "s1"}', '{"question_id": 1}', "\\xff")),
        *(("verdicts", line) for line in ("{]", '{"question_id": "d1", "judge": 1, "case": "", "verdict": true}')),
    ],
)
def test_damaged_rows_name_their_line(cfg: EvaluateConfig, name: str, line: str) -> None:
    evaluate(cfg, Judge(), chat=Chat())
    path = Path(cfg.out) / f"{name}.jsonl"
    good = path.read_text().splitlines()[0]
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError, match=rf"{name}.jsonl \[line 2\]: not .*overwrite"):
        evaluate(cfg, Judge(), chat=Chat())


def test_conditions_lie_side_by_side(cfg: EvaluateConfig) -> None:
    chat = Chat()
    report = evaluate(replace(cfg, conditions=["x0", "evidence", "abstain", "always_a"]), Judge(), chat=chat)
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
    report = evaluate(replace(cfg, conditions=["x0", "evidence", "x2"]), Judge(), chat=chat)
    assert len(chat.asked) == 6
    assert "because" in chat.asked[0].messages[0].text
    assert [report["conditions"][name]["resumed"] for name in ("x0", "evidence", "x2")] == [6, 6, 0]
    with pytest.raises(ConfigError, match="differs in"):
        evaluate(cfg, Judge(), chat=chat)


def test_a_dry_run_asks_nothing_and_leaves_nothing(cfg: EvaluateConfig, tmp_path: Path) -> None:
    llm = LLMConfig(
        default=EndpointConfig("m", "http://127.0.0.1:9/v1"), dry_run=str(tmp_path / "dry.jsonl"), cache=None
    )
    for answers, stages in (("server", {"answer": 6, "judge": 2}), ("local", {"judge": 2})):
        found = evaluate(replace(cfg, llm=llm, judge="llm", answers=answers))["dry_run"]  # type: ignore[arg-type]
        assert {name: row["requests"] for name, row in found["stages"].items()} == stages
        assert len((tmp_path / "dry.jsonl").read_text().splitlines()) == sum(stages.values())
        assert not Path(cfg.out).exists()


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
    evaluate(local, Judge())
    asked.clear()
    before = {path.name: path.read_bytes() for path in Path(local.out).iterdir()}
    with pytest.raises(ConfigError, match=r"differs in level, max_new_tokens; choose another out"):
        evaluate(replace(local, level="x1", max_new_tokens=7), Judge())
    other = str(save_nano(tmp_path / "other", seed=1))
    with pytest.raises(ConfigError, match="differs in model;"):
        evaluate(replace(local, model=other), Judge())
    assert {path.name: path.read_bytes() for path in Path(local.out).iterdir()} == before
    assert asked == []
    # the same weights from a folder are the same model
    assert evaluate(replace(local, model=str(save_nano(tmp_path / "same")), batch_size=5), Judge())["resumed"] == 6
    assert evaluate(replace(local, level="x1", overwrite=True), Judge())["resumed"] == 0
    assert len(asked) == 6


def test_a_folder_of_something_else_is_refused(cfg: EvaluateConfig) -> None:
    Path(cfg.out).mkdir()
    (Path(cfg.out) / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="something else"):
        evaluate(cfg, Judge(), chat=Chat())
    with pytest.raises(ConfigError, match="is a file"):
        evaluate(replace(cfg, out=str(Path(cfg.out) / "thesis.tex")), Judge(), chat=Chat())
    (Path(cfg.out) / "run.json").write_text('{"format": "else"}')
    with pytest.raises(DataError, match="not the identity"):
        evaluate(cfg, Judge(), chat=Chat())
    assert (Path(cfg.out) / "thesis.tex").read_text() == "mine"


def test_states_that_do_not_serve(
    cfg: EvaluateConfig, tmp_path: Path, make_record: Callable[..., StateRecord], write_states: Callable[..., Path]
) -> None:
    with pytest.raises(DataError, match=r"no states of split 'dev' \(there are: test, train\)"):
        evaluate(replace(cfg, split="dev"), Judge(), chat=Chat())
    with pytest.raises(FormatError, match="no manifest"):
        evaluate(replace(cfg, states=str(tmp_path / "nowhere")), Judge(), chat=Chat())
    twice = write_states(make_record("q"), make_record("q"), name="twice")
    with pytest.raises(DataError, match=r"\[q\]: this question id occurs twice"):
        load_questions(twice, "test", ["x0"])
    shared = write_states(make_record("a"), replace(make_record("b", split="train"), dialogue_id="d-a"), name="shared")
    with pytest.raises(DataError, match="evidence of training question b too"):
        load_questions(shared, "test", ["x0"])
    assert not Path(cfg.out).exists()
    for limit, ids in ((3, ["s1", "v1", "d2"]), (99, ["s1", "m1", "v1", "d1", "d2", "m2"])):
        assert [r.question_id for r in load_questions(cfg.states, "test", ["x0"], limit=limit).records] == ids


def test_models_and_settings_that_do_not_serve(cfg: EvaluateConfig) -> None:
    for model in ("does/not/exist", "minilm"):
        with pytest.raises(ModelError, match=model) as caught:
            evaluate(replace(cfg, answers="local", model=model), Judge())
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"no endpoint for stage answer; set llm.answer"):
        evaluate(cfg, Judge())
    with pytest.raises(ConfigError, match=r"no endpoint for stage judge; set llm.judge"):
        evaluate(replace(cfg, judge="llm"), chat=Chat())
    for name in ("max_new_tokens", "batch_size", "bootstrap", "limit"):
        with pytest.raises(ConfigError, match=f"{name} must be at least 1"):
            replace(cfg, **{name: 0})
    with pytest.raises(ConfigError, match="judge must be one of offline, llm, not 'gpt'"):
        replace(cfg, judge="gpt")  # type: ignore[arg-type]
    assert not Path(cfg.out).exists()
    silent: dict[str, Reply | str] = dict.fromkeys(RIGHT, Reply("", failure="server", message="no memory"))
    with pytest.raises(ModelError, match="none of 6 questions: no memory"):
        evaluate(cfg, Judge(), chat=Chat(silent))


@pytest.mark.parametrize("after", ["answer v1", "judge No information available"])
def test_a_killed_run_asks_again_only_what_was_under_way(cfg: EvaluateConfig, after: str) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = os.fdopen(writer, "w")
            evaluate(cfg, Judge(stuck_at=after, said=said), chat=Chat(stuck_at=after, said=said))  # type: ignore[arg-type]
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
    report = evaluate(cfg, judge, chat=chat)
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
            evaluate(cfg, Judge(), chat=Chat(stuck_at="answer v1", said=os.fdopen(writer, "w")))  # type: ignore[arg-type]
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
                evaluate(again, Judge(), chat=Chat())
        assert (path.read_bytes(), path.stat().st_ino) == before
        assert before[0].count(b"\n") == 2
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    left = Path(cfg.out) / ".config.yaml.0a1b2c3d.tmp"
    left.write_text("half")
    assert evaluate(cfg, Judge(), chat=Chat())["resumed"] == 2
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
