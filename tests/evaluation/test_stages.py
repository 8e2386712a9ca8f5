"""Stages and conditions of an evaluation: what is asked, kept, asked again, and told apart."""

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

from remind.core.errors import ConfigError, DataError
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import evaluate, evaluate_and_show
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Reply, Request
from remind.states.parquet import StateRecord

RIGHT = {
    "s1": "<answer>B</answer><explanation>Ana: s1 line 1</explanation>",
    "m1": "<answer>[A,D]</answer><explanation></explanation>",
    "v1": "<answer>A</answer><explanation>[0]</explanation>",
    "d1": "<answer>hiking</answer><explanation></explanation>",
    "d2": "<answer>No information available</answer><explanation></explanation>",
    "m2": "<answer>[C]</answer><explanation></explanation>",
}


@dataclass
class Chat:
    """A chat model with a reply for every question id."""

    replies: dict[str, Reply | str]
    name: str = "chat@test"
    asked: list[Request] = field(default_factory=list)

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        found = []
        for n, request in enumerate(requests):
            self.asked.append(request)
            given = self.replies[request.sample]
            reply = given if isinstance(given, Reply) else Reply(given, prompt_tokens=9, completion_tokens=4, calls=1)
            found.append(reply)
            if on_reply is not None:
                on_reply(n, reply)
        return found

    @property
    def ids(self) -> list[str]:
        return [request.sample for request in self.asked]


@dataclass
class Judge:
    """Accepts an answer that equals a reference; fails as told."""

    fails: tuple[str, ...] = ()
    name: str = "equal"
    asked: list[str] = field(default_factory=list)

    def judge(self, question: str, references: Sequence[str], prediction: str) -> Any:
        self.asked.append(prediction)
        if prediction in self.fails:
            return "perhaps"
        return prediction in references


@pytest.fixture
def cfg(tmp_path: Path, six: list[StateRecord], write_states: Callable[..., Path]) -> EvaluateConfig:
    return EvaluateConfig(
        states=str(write_states(*six)), model="a name", out=str(tmp_path / "out"), answers="server", bootstrap=20
    )


def rows(cfg: EvaluateConfig, name: str = "predictions.jsonl") -> dict[str, dict[str, Any]]:
    lines = (Path(cfg.out) / name).read_text().splitlines()
    return {row["question_id"]: row for row in map(json.loads, lines)}


def test_requests_are_the_prompts_of_the_states(cfg: EvaluateConfig, six: list[StateRecord]) -> None:
    chat = Chat(dict(RIGHT))
    report = evaluate(replace(cfg, level="x1"), Judge(), chat=chat)
    assert {r.sample: [(m.role, m.text) for m in r.messages] for r in chat.asked} == {
        record.question_id: [("user", record.x1.text)] for record in six if record.split == "test"
    }
    assert {(r.stage, r.temperature, r.max_tokens) for r in chat.asked} == {("answer", 0.0, 512)}
    assert report["overall"]["accuracy"]["value"] == 1.0
    assert report["identity"]["model"] == "chat@test"
    assert (report["counts"]["prompt_tokens"], report["counts"]["new_tokens"]) == (54, 24)


def test_stages_one_by_one_give_what_all_gives(cfg: EvaluateConfig) -> None:
    whole = evaluate(cfg, Judge(), chat=Chat(dict(RIGHT)))
    parts = replace(cfg, out=cfg.out + "2")
    chat, judge = Chat(dict(RIGHT)), Judge()
    assert evaluate(replace(parts, stage="answer"), chat=chat)["x0"]["questions"] == 6
    assert not (Path(parts.out) / "verdicts.jsonl").exists()
    assert evaluate(replace(parts, stage="judge"), judge)["x0"]["judged"] == 2
    # the report needs no chat model and no judge: there is no endpoint to ask
    report = evaluate(replace(parts, stage="report"))
    assert report["overall"] == whole["overall"]
    assert report["identity"] == whole["identity"]
    assert rows(parts) == rows(cfg)
    assert rows(parts, "verdicts.jsonl") == rows(cfg, "verdicts.jsonl")
    assert (len(chat.asked), judge.asked) == (6, ["hiking", "No information available"])


def test_there_is_one_verdict_per_question(cfg: EvaluateConfig) -> None:
    replies: dict[str, Reply | str] = {**RIGHT, "m2": "no idea", "v1": Reply("", failure="server", message="away")}
    evaluate(cfg, Judge(("hiking",)), chat=Chat(replies))
    found = {key: (row["judge"], row["verdict"], row["why"]) for key, row in rows(cfg, "verdicts.jsonl").items()}
    assert found == {
        "s1": ("letters", True, ""),
        "m1": ("letters", True, ""),
        "v1": ("letters", None, "server"),
        "d1": ("equal", None, "neither"),
        "d2": ("equal", True, ""),
        "m2": ("letters", None, "unparsable"),
    }


def test_a_stage_that_has_nothing_to_read_says_what_to_run(cfg: EvaluateConfig) -> None:
    for stage in ("judge", "report"):
        with pytest.raises(ConfigError, match="holds no answers; run stage answer"):
            evaluate(replace(cfg, stage=stage), Judge())  # type: ignore[arg-type]
    assert not Path(cfg.out).exists()
    evaluate(replace(cfg, stage="answer"), chat=Chat(dict(RIGHT)))
    with pytest.raises(DataError, match=r"\[d1\]: its answer has no verdict yet; run stage judge"):
        evaluate(replace(cfg, stage="report"))
    path = Path(cfg.out) / "predictions.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:4]))
    with pytest.raises(DataError, match=r"\[d2\]: 2 questions have no answer yet"):
        evaluate(replace(cfg, stage="judge"), Judge())
    with pytest.raises(ConfigError, match="differs in split"):
        evaluate(replace(cfg, stage="judge", split="train"), Judge())
    with pytest.raises(ConfigError, match="overwrite would drop"):
        replace(cfg, stage="report", overwrite=True)


def test_failures_are_told_apart_from_wrong_answers(cfg: EvaluateConfig) -> None:
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
    assert (overall["accuracy"]["value"], overall["accuracy"]["n"]) == (0.0, 2)
    assert (overall["accuracy_failures_wrong"]["value"], overall["accuracy_failures_wrong"]["n"]) == (0.0, 6)
    assert overall["failed"] == 4
    text = (Path(cfg.out) / "report.md").read_text()
    assert "## Failures" in text
    page = (Path(cfg.out) / "report.html").read_text()
    for words in ("no room", "503", "I would rather not say."):
        assert words in page


@pytest.mark.parametrize(
    ("reply", "verdict", "problem"),
    [
        ("B", True, "no answer tag"),
        ("<answer>B</answer> or <answer>C</answer>", True, "several answer tags"),
        ("<answer>B</answer>\ud800", True, "no explanation tag"),
        ("<answer>Z</answer>", False, "letters that name no option"),
        ("<answer>[]</answer>", False, "empty option set"),
        ("<answer>{ }</answer>", False, "empty option set"),
        ("<answer></answer>", None, "no option letter"),
        ("", None, "no option letter"),
        ("perhaps the second one", None, "no option letter"),
    ],
)
def test_bad_replies_are_defined_and_counted(
    cfg: EvaluateConfig, reply: str, verdict: bool | None, problem: str
) -> None:
    report = evaluate(cfg, Judge(), chat=Chat({**RIGHT, "s1": reply}))
    assert rows(cfg, "verdicts.jsonl")["s1"]["verdict"] is verdict
    assert problem in rows(cfg)["s1"]["problems"]
    assert report["counts"]["problems"][problem] >= 1
    assert report["counts"]["failures"] == ({"unparsable": 1} if verdict is None else {})
    assert report["overall"]["accuracy"]["n"] == (5 if verdict is None else 6)


def test_passing_failures_are_tried_again_and_lasting_ones_are_not(cfg: EvaluateConfig) -> None:
    first: dict[str, Reply | str] = {
        **RIGHT,
        "s1": Reply("", failure="server"),
        "m1": Reply("", failure="refused"),
        "v1": Reply("", failure="too_long"),
    }
    judge = Judge(("hiking",))
    assert evaluate(cfg, judge, chat=Chat(first))["counts"]["failures"]["judge"] == 1
    chat, judge = Chat(dict(RIGHT)), Judge()
    report = evaluate(cfg, judge, chat=chat)
    assert chat.ids == ["s1", "m1"]
    assert judge.asked == ["hiking"]
    assert report["counts"]["failures"] == {"too_long": 1}
    assert (report["resumed"], report["verdicts_resumed"]) == (4, 1)


def test_another_judge_judges_anew_and_asks_for_no_answer(cfg: EvaluateConfig) -> None:
    evaluate(cfg, Judge(), chat=Chat(dict(RIGHT)))
    chat, other = Chat({}), Judge(name="other")
    report = evaluate(cfg, other, chat=chat)
    assert (chat.asked, len(other.asked)) == ([], 2)
    assert report["identity"]["judge"] == "other"


def test_answers_to_another_prompt_are_not_taken(cfg: EvaluateConfig) -> None:
    evaluate(cfg, Judge(), chat=Chat(dict(RIGHT)))
    path = Path(cfg.out) / "predictions.jsonl"
    changed = path.read_text().replace(rows(cfg)["v1"]["prompt"], "0" * 16)
    path.write_text(changed)
    chat = Chat(dict(RIGHT))
    evaluate(cfg, Judge(), chat=chat)
    assert chat.ids == ["v1"]


@pytest.mark.parametrize("line", ["{]", '{"question_id": "d1", "judge": 1, "case": "", "verdict": true}'])
def test_damaged_verdicts_name_their_line(cfg: EvaluateConfig, line: str) -> None:
    evaluate(cfg, Judge(), chat=Chat(dict(RIGHT)))
    path = Path(cfg.out) / "verdicts.jsonl"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=r"verdicts.jsonl \[line 7\]: not a verdict"):
        evaluate(cfg, Judge(), chat=Chat({}))


def test_conditions_lie_side_by_side(cfg: EvaluateConfig) -> None:
    both = replace(cfg, conditions=["x0", "evidence", "abstain", "always_a"])
    chat = Chat(dict(RIGHT))
    report = evaluate(both, Judge(), chat=chat)
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
    text = (Path(cfg.out) / "report.md").read_text()
    assert "-83.3" in text
    assert "Conditions side by side" in text


def test_a_condition_that_comes_later_costs_only_itself(cfg: EvaluateConfig) -> None:
    evaluate(replace(cfg, conditions=["x0", "x1"]), Judge(), chat=Chat(dict(RIGHT)))
    chat = Chat(dict(RIGHT))
    report = evaluate(replace(cfg, conditions=["x0", "x1", "x2"]), Judge(), chat=chat)
    assert len(chat.asked) == 6
    assert "because" in chat.asked[0].messages[0].text
    assert [report["conditions"][name]["resumed"] for name in ("x0", "x1", "x2")] == [6, 6, 0]
    with pytest.raises(ConfigError, match="differs in"):
        evaluate(cfg, Judge(), chat=chat)


def test_a_dry_run_asks_nothing_and_leaves_nothing(cfg: EvaluateConfig, tmp_path: Path) -> None:
    llm = LLMConfig(
        default=EndpointConfig("m", "http://127.0.0.1:9/v1"), dry_run=str(tmp_path / "dry.jsonl"), cache=None
    )
    found = evaluate(replace(cfg, llm=llm, judge="llm"))["dry_run"]
    assert found["stages"]["answer"]["requests"] == 6
    assert found["stages"]["judge"]["requests"] == 2
    assert not Path(cfg.out).exists()
    assert len((tmp_path / "dry.jsonl").read_text().splitlines()) == 8


def test_endpoints_that_are_not_named(cfg: EvaluateConfig) -> None:
    with pytest.raises(ConfigError, match=r"no endpoint for stage answer; set llm.answer"):
        evaluate(cfg, Judge())
    with pytest.raises(ConfigError, match=r"no endpoint for stage judge; set llm.judge"):
        evaluate(replace(cfg, judge="llm"), chat=Chat(dict(RIGHT)))


def test_stages_tell_where_they_wrote(
    cfg: EvaluateConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("remind.evaluation.run.Parts._server", lambda self, stage: Chat(dict(RIGHT)))
    evaluate_and_show(replace(cfg, stage="answer", conditions=["x0", "abstain"]))
    assert capsys.readouterr().out.splitlines() == [
        "x0, 6 questions, 0 left out, 0 failed, 0 resumed",
        "abstain, 6 questions, 0 left out, 0 failed, 0 resumed",
        f"answers: {cfg.out}",
    ]


class StuckChat(Chat):
    """Says what it is asked before it answers; never answers `stuck_at`."""

    said: Any = None
    stuck_at = ""

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        assert on_reply is not None
        for n, request in enumerate(requests):
            _say(self, f"answer {request.sample}")
            super().complete([request], lambda _, reply, n=n: on_reply(n, reply))  # type: ignore[misc]
        return []


class StuckJudge(Judge):
    said: Any = None
    stuck_at = ""

    def judge(self, question: str, references: Sequence[str], prediction: str) -> Any:
        _say(self, f"judge {prediction}")
        return super().judge(question, references, prediction)


def _say(model: StuckChat | StuckJudge, words: str) -> None:
    print(words, file=model.said, flush=True)
    if words == model.stuck_at:
        time.sleep(600)


@pytest.mark.parametrize("after", ["answer v1", "judge No information available"])
def test_a_killed_run_asks_again_only_what_was_under_way(cfg: EvaluateConfig, after: str) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            stuck = StuckChat(dict(RIGHT)), StuckJudge()
            for model in stuck:
                model.said, model.stuck_at = os.fdopen(os.dup(writer), "w"), after
            evaluate(cfg, stuck[1], chat=stuck[0])
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
    chat, judge = Chat(dict(RIGHT)), Judge()
    report = evaluate(cfg, judge, chat=chat)
    again = [f"answer {name}" for name in chat.ids] + [f"judge {text}" for text in judge.asked]
    assert set(seen) & set(again) == {after}
    assert len(set(seen) | set(again)) == 8
    assert report["overall"]["accuracy"]["value"] == 1.0
