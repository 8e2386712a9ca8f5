"""Running and scoring memory systems: what is measured, resumed, answered, judged and shown."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Proxy, completion
from remembering import SAID, locomo_file
from running import use_words

from remind.core.errors import ConfigError, DataError
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.base import Query
from remind.memory.config import RunMemoryConfig, ScoreMemoryConfig
from remind.memory.plain import PlainBank
from remind.memory.run import run_memory
from remind.memory.score import MANIFEST, read_units, score_memory
from remind.states.prompts import prompt_id

_SAID = [
    ["I adopted a <b>dog</b> called Rex.", *SAID[0][1:]],
    SAID[1],
    ["My sister paints boats.", "Does she sell them?", "Only at the harbour market."],
]
_ASKED = [
    ("What is the dog called?", "Rex", ["D1:1"], 4),
    ("Where did she move, and when?", "Lisbon, May", ["D2:1"], 1),
    ("What is warm and blue there?", "the tiles", ["D2:2", "D2:3"], 3),
    ("Who sings?", None, [], 5),
]


@pytest.fixture(autouse=True)
def _encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    use_words(monkeypatch.setattr)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    asked = [
        {"question": text, "evidence": gold, "category": category}
        | ({"answer": answer} if answer else {"adversarial_answer": "nobody"})
        for text, answer, gold, category in _ASKED
    ]
    facts = {"session_1_observation": {"Ann": [["Ann has a pet named Rex.", "D1:1"]]}}
    return locomo_file(tmp_path / "talk.json", ("conv-1", "conv-2"), _SAID, asked, observation=facts)


def config(data: Path, out: Path, **changes: Any) -> RunMemoryConfig:
    settings: dict[str, Any] = {"systems": ["bm25", "session"], "k": [1, 2], "budgets": [12, 30]}
    return RunMemoryConfig(str(data), str(out), **{**settings, "llm": LLMConfig(cache=None), **changes})


def units(out: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(unit["system"], unit["dialogue"]): unit for unit in read_units(out)}


def test_scores_are_those_counted_by_hand(data: Path, tmp_path: Path) -> None:
    out = run_memory(config(data, tmp_path / "run"))
    scores = score_memory(ScoreMemoryConfig(str(out), str(tmp_path / "scores.json"), resamples=50))
    assert json.loads((tmp_path / "scores.json").read_text()) == json.loads(json.dumps(scores))
    found = units(out)
    rows = {(row["system"], row["at"], row["value"]): row for row in scores["rows"]}
    assert len(rows) == len(scores["rows"]) == 5 * 4
    gold = {f"{text} {name}": {*ids} for name in ("conv-1", "conv-2") for text, _, ids, _ in _ASKED}
    for (system, at, value), row in rows.items():
        recalls, tokens = [], []
        for name in ("conv-1", "conv-2"):
            for asked in found[system, name]["rows"]:
                wanted = gold[asked["text"]]
                shown = asked["top"][:value] if at == "k" else asked["budgets"][str(value)]
                assert at == "k" or sum(memory[2] for memory in shown) <= value
                if wanted:
                    recalls.append(len(wanted & {turn for memory in shown for turn in memory[1]}) / len(wanted))
                    tokens.append(sum(memory[2] for memory in shown))
        assert row["recall"] == pytest.approx(sum(recalls) / 6)
        assert row["tokens"] == pytest.approx(sum(tokens) / 6)
        assert (row["n"], row["dataset"]) == (6, "locomo")
    # words of the question stand in the gold turn alone
    assert rows["bm25", "k", 1]["recall"] >= 2 / 3
    assert rows["gold", "k", 2]["recall"] == 1.0
    assert rows["no_context", "tokens", 30]["recall"] == rows["no_context", "tokens", 30]["tokens"] == 0.0
    pairs = {(row["system"], row["minus"], row["at"], row["value"]): row for row in scores["paired"]}
    difference = rows["session", "k", 1]["recall"] - rows["bm25", "k", 1]["recall"]
    assert pairs["session", "bm25", "k", 1]["difference"] == pytest.approx(difference)
    assert "<b>dog" not in (tmp_path / "scores.html").read_text()


def test_a_failure_is_no_wrong_answer_and_it_alone_is_made_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PlainBank.rank

    def rank(self: PlainBank, query: Query, *given: Any) -> Any:
        assert not any(word in repr(query) for word in ("Rex", "D1:1", "Lisbon"))
        if self.dialogue_id == "conv-2":
            raise DataError("the index is broken", self.folder)
        return real(self, query, *given)

    with monkeypatch.context() as patch:
        patch.setattr(PlainBank, "rank", rank)
        out = run_memory(config(data, tmp_path / "run", systems=["bm25"]))
    scores = score_memory(ScoreMemoryConfig(str(out), str(tmp_path / "scores.json"), resamples=20))
    (failure,) = scores["failures"]
    assert (failure["system"], failure["dialogue"], failure["stage"]) == ("bm25", "conv-2", "retrieve")
    rows = {(row["system"], row["at"], row["value"]): row for row in scores["rows"]}
    assert (rows["bm25", "k", 1]["n"], rows["gold", "k", 1]["n"]) == (3, 6)
    folder = out / "memory" / "units"
    whole = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json") if "is broken" not in path.read_text()}
    # what a process that was killed was writing
    (folder / "bm25" / ".one.json.abcdefgh.tmp").touch()
    run_memory(config(data, tmp_path / "run", systems=["bm25", "lme_facts"]))
    assert {path: path.stat().st_mtime_ns for path in whole} == whole
    assert {name for name, _ in units(out)} == {"no_context", "full_context", "gold", "bm25", "lme_facts"}
    assert all(unit["failed"] is None for unit in read_units(out))
    assert not [*out.rglob("*.tmp")]


def _answer(body: Mapping[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A model that knows one answer, and a judge who accepts it."""
    asked = " ".join(str(message["content"]) for message in body["messages"])
    if "verdict" in asked:
        return 200, {}, completion('{"verdict": true}')
    return 200, {}, completion("Rex" if "dog called" in asked.lower() and "called Rex" in asked else "no idea")


@pytest.fixture
def server(quick: None) -> Iterator[Proxy]:
    with Proxy(answer=_answer) as proxy:  # type: ignore[arg-type]
        yield proxy


def test_answers_are_scored_judged_and_paid_for_once(data: Path, tmp_path: Path, server: Proxy) -> None:
    llm = LLMConfig(EndpointConfig("m", server.url, price_prompt=1e6), cache=str(tmp_path / "cache.sqlite"))
    settings = config(data, tmp_path / "run", systems=["bm25"], llm=llm, judge="llm", answer_k=2)
    out = run_memory(settings)
    hits = server.hits
    scores = score_memory(ScoreMemoryConfig(str(out), str(tmp_path / "scores.json"), resamples=20))
    report = json.loads((out / "report.json").read_text())
    fours = {name: part["by_category"]["4"] for name, part in report["conditions"].items()}
    found = {name: [row[measure]["value"] for measure in ("locomo_f1", "accuracy")] for name, row in fours.items()}
    assert found == {"bm25": [1.0, 1.0], "gold": [1.0, 1.0], "full_context": [1.0, 1.0], "no_context": [0.0, 1.0]}
    assert scores["notes"] == [
        f"Answers: m@{server.url}, reader direct, {prompt_id('memory_read')}.",
        f"Verdicts: m@{server.url}, {prompt_id('ask_judge')}.",
    ]
    # what is counted by system is what the server saw
    told = json.loads((out / MANIFEST).read_text())["costs"]
    judged = json.loads((out / "report.json").read_text())["costs"]["total"]["now"]["calls"]
    assert sum(row["now"]["calls"] for row in told) + judged == hits
    (cost,) = [row for row in scores["costs"] if row["system"] == "bm25"]
    calls = sum(row["calls"] for row in told if row["system"] == "bm25" and row["stage"] == "read")
    assert (cost["question"]["calls"], cost["ingest"]["calls"]) == (pytest.approx(calls / 8), 0)
    # runs that have the same units cost what one of them did
    for name in ("one", "two"):
        shutil.copytree(out, tmp_path / "both" / name)
    both = score_memory(ScoreMemoryConfig(str(tmp_path / "both"), str(tmp_path / "both.json"), resamples=20))
    assert both["costs"] == scores["costs"]
    # a dialogue of another dataset may have the same id
    for path in (tmp_path / "both" / "two").rglob("*.json"):
        path.write_text(path.read_text().replace('"dataset": "locomo"', '"dataset": "other"'))
    both = score_memory(ScoreMemoryConfig(str(tmp_path / "both"), str(tmp_path / "both.json"), resamples=20))
    assert both["costs"] == [{**row, "dataset": name} for name in ("locomo", "other") for row in scores["costs"]]
    # with other budgets everything is retrieved again, and no reply is paid for twice
    run_memory(config(data, tmp_path / "run", systems=["bm25"], llm=llm, judge="llm", answer_k=2, budgets=[9]))
    assert server.hits == hits


def _assessed(body: Mapping[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """The same, with a judge of personalisation who finds Rex in the reply, the memory and nowhere else."""
    asked = " ".join(str(message["content"]) for message in body["messages"])
    shown = asked.partition("<<<question")[2]
    for key in ("personalised", "signals", "suffices"):
        if f'"{key}"' in asked:
            where = shown.partition("<<<reply")[2].partition("<<<")[0] if key == "personalised" else shown
            return 200, {}, completion(json.dumps({key: "Rex" in where}))
    if '"richness"' in asked:
        return 200, {}, completion("I would say so.")
    if "verdict" in asked:
        return 200, {}, completion(json.dumps({"verdict": "no idea" not in shown}))
    return _answer(body)


def test_how_answers_use_what_is_remembered_is_judged_beside_them(data: Path, tmp_path: Path, quick: None) -> None:
    with Proxy(answer=_assessed) as server:  # type: ignore[arg-type]
        llm = LLMConfig(EndpointConfig("m", server.url), cache=str(tmp_path / "cache.sqlite"))
        settings = config(data, tmp_path / "run", systems=["bm25"], llm=llm, judge="p13n", answer_k=1, reader="respond")
        out = run_memory(settings)
    scores = score_memory(ScoreMemoryConfig(str(out), str(tmp_path / "scores.json"), resamples=20))
    rows = scores["p13n"]
    # Rex is named in both dialogues, and no reply to that can be read; all else could have been said with Rex in it
    whole = rows["bm25"]
    assert (whole["n"], whole["unread"], whole["underuse"]["value"], whole["p13n"]["value"]) == (6, 2, 1.0, 0.0)
    # of the wrong answers one turn was shown, which does not tell of Rex; the bank does
    assert whole["errors"] == {"memory": 0, "profile": 6, "generation": 0, "unread": 0}
    assert (rows["no_context"]["na"]["value"], rows["no_context"]["errors"]["memory"]) == (1.0, 8)
    assert "<h3>Personalisation</h3>" in (tmp_path / "scores.html").read_text()


def test_a_dry_run_sends_nothing_and_leaves_no_run(data: Path, tmp_path: Path, server: Proxy) -> None:
    prompts = tmp_path / "dry.jsonl"
    llm = LLMConfig(EndpointConfig("m", server.url), cache=None, dry_run=str(prompts))
    run_memory(config(data, tmp_path / "run", systems=["bm25"], llm=llm))
    assert server.hits == 0
    assert not (tmp_path / "run").exists()
    assert {json.loads(line)["stage"] for line in prompts.read_text().splitlines()} == {"read"}


def test_no_id_tells_that_there_is_no_answer(tmp_path: Path) -> None:
    """LongMemEval's questions without an answer end in _abs, and its gold sessions begin with answer_."""
    said = [{"role": "user", "content": "I like tea.", "has_answer": True}, {"role": "assistant", "content": "Noted."}]
    instance = {
        "question_id": "q1_abs", "question_type": "t", "question": "Coffee?", "answer": "Not told.",
        "question_date": "2023/05/20",
        "haystack_session_ids": ["answer_1"], "haystack_dates": ["2023/05/19"], "haystack_sessions": [said],
        "answer_session_ids": ["answer_1"],
    }  # fmt: skip
    data = tmp_path / "one.json"
    data.write_text(json.dumps([instance]))
    out = run_memory(config(data, tmp_path / "run", systems=["dense"]))
    (bank,) = (out / "memory" / "banks").rglob("bank.sqlite")
    content = bank.read_bytes() + b"".join(path.read_bytes() for path in bank.parent.glob("bank.sqlite-*"))
    assert [word in content for word in (b"tea", b"answer", b"_abs")] == [True, False, False]
    # nor has what nobody told a recall
    assert score_memory(ScoreMemoryConfig(str(out), str(tmp_path / "scores.json"), resamples=20))["rows"] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": "train"}, "has none; set states"),
        ({"systems": ["gold"]}, "gold is always included"),
        ({"export": "official"}, r"talk.json is in another format"),
        ({"judge": "p13n"}, "judge p13n needs an endpoint"),
    ],
)
def test_settings_that_cannot_be_run(data: Path, tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_memory(config(data, tmp_path / "new" / "run", **changes))
    assert not (tmp_path / "new").exists()
    with pytest.raises(DataError, match="holds no finished run"):
        score_memory(ScoreMemoryConfig(str(tmp_path), str(tmp_path / "scores.json")))
