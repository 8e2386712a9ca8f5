from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fault_proxy import Proxy, completion
from running import use_words
from scripted import ScriptedChat
from words import WordEncoder, services

from experiments.official.score import ScoreOfficialConfig, score_official
from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Session, Turn
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.request import Reply
from remind.memory.base import Query, Retrieval
from remind.memory.config import RunMemoryConfig
from remind.memory.longmemeval import LongMemEvalBank, LongMemEvalSystem
from remind.memory.run import run_memory
from remind.states.pyramid import turn_text

WORDS = re.findall(r"\w+", "tea milk bread ship river stone cloud piano horse garden train letter window market")


def talk(seed: int, sessions: int = 6, names: tuple[str, str] = ("Ana", "Bo")) -> list[Session]:
    """Random words, a session a month from January 2023."""
    draws = np.random.default_rng(seed)
    made = []
    for number in range(1, sessions + 1):
        turns = [
            Turn(f"D{number}:{n}", names[(n + 1) % 2], " ".join(draws.choice(WORDS, 4)) + f" word{number}x{n}")
            for n in range(1, 7)
        ]
        made.append(Session(f"S{number}", f"2023-{number:02}-10T10:00", tuple(turns)))
    return made


def annotated(tmp_path: Path, sessions: list[Session]) -> tuple[str, dict[str, list[str]]]:
    """LoCoMo's file with a fact for every other turn, and one for the first two turns of a session; facts by turn."""
    draws = np.random.default_rng(7)
    conversation, facts, by_turn = {}, {}, dict[str, list[str]]()
    for session in sessions:
        number = session.id[1:]
        conversation[f"session_{number}"] = [
            {"speaker": t.speaker, "dia_id": t.id, "text": t.text} for t in session.turns
        ]
        rows: list[Any] = [[" ".join(draws.choice(WORDS, 3)), [turn.id]] for turn in session.turns[::2]]
        rows.append(["shared fact", [turn.id for turn in session.turns[:2]]])
        for text, names in rows:
            for name in names:
                by_turn.setdefault(name, []).append(text)
        facts[f"session_{number}_observation"] = {"Ana": rows}
    path = tmp_path / "locomo.json"
    path.write_text(json.dumps([{"sample_id": "d", "conversation": conversation, "observation": facts}]))
    return str(path), by_turn


def bank_of(
    folder: Path, system: LongMemEvalSystem, sessions: list[Session], chat: ScriptedChat | None = None
) -> LongMemEvalBank:
    bank = system.open(folder, "d", services(chat))
    for session in sessions:
        bank.ingest(session)
    return bank


def keys_of(bank: LongMemEvalBank) -> list[str]:
    keys = bank.store.rows("SELECT memory, text FROM keys ORDER BY row")
    return [bank.store.memory(number).text if text is None else text for number, text in keys]


def ids(retrieval: Retrieval) -> list[tuple[str, ...] | None]:
    return [memory.sources for memory in retrieval.memories]


def cosines(query: str, keys: dict[Any, list[str]]) -> dict[Any, float]:
    """The best key's cosine of every value, in float64."""
    encoder = WordEncoder()
    asked = encoder.encode([query]).double()
    return {value: (encoder.encode(texts).double() @ asked.T).max().item() for value, texts in keys.items() if texts}


@pytest.mark.parametrize("value", ["turn", "round", "session"])
def test_ranking_is_that_of_the_best_key_in_float64(tmp_path: Path, value: Any) -> None:
    sessions = talk(1)
    (path, facts), keys = annotated(tmp_path, sessions), {}
    system = LongMemEvalSystem(value=value, source="replay", annotations=path, time="none")
    size = {"turn": 1, "round": 2, "session": 6}[value]
    for session in sessions:
        for start in range(0, 6, size):
            part = session.turns[start : start + size]
            texts = [" ".join([*facts.get(turn.id, []), turn_text(turn)]) for turn in part]
            keys[tuple(turn.id for turn in part)] = texts
    with bank_of(tmp_path / "bank", system, sessions) as bank:
        for query in ("shared fact", "piano horse", "river stone cloud word3x4", "letter"):
            found, expected = ids(bank.retrieve(Query(query), k=36)), cosines(query, keys)
            assert sorted(found) == sorted(expected)
            # equal words give cosines that differ in float32's last bits, in any order
            assert [expected[value] for value in found] == pytest.approx(
                sorted(expected.values(), reverse=True), abs=1e-6
            )


def test_what_is_outside_the_time_asked_for_moves_behind_in_order(tmp_path: Path) -> None:
    sessions, question, month = talk(3), "the piano horse in may", 5
    plain = LongMemEvalSystem(value="turn", expansion="none", time="none")
    # two days beside the range are near enough, three are not
    before = sessions[month - 2]
    days = ("2023-04-29", "2023-04-28")
    told = [replace(turn, text=f"x {day}") for turn, day in zip(before.turns, days, strict=False)]
    sessions[month - 2] = replace(before, turns=(*told, *before.turns[2:]))
    with bank_of(tmp_path / "plain", plain, sessions) as bank:
        order = ids(bank.retrieve(Query(question), k=36))
    with bank_of(tmp_path / "timed", replace(plain, time="rules"), sessions) as bank:
        timed = bank.retrieve(Query(question), k=36)
        assert bank.retrieve(Query("horse before March 2023"), k=36).trace["range"] is None
    inside = {(turn.id,) for turn in sessions[month - 1].turns} | {(told[0].id,)}
    assert (len(order), len(inside)) == (36, 7)
    assert ids(timed) == [x for x in order if x in inside] + [x for x in order if x not in inside]
    assert timed.trace["range"][0] == f"2023-{month:02}-01"


def test_an_llm_writes_facts_events_and_ranges(tmp_path: Path) -> None:
    sessions = talk(6, 2)
    values = {
        "facts": {"facts": ["Somebody owns a submarine."]},
        "events": {"events": [{"message": 1, "date": "2021/12/24", "event": "Christmas"}]},
        "time_range": {"start": "2021/12/24", "end": "2021/12/25"},
    }
    chat = ScriptedChat(lambda request: Reply("", values[request.stage]))
    with bank_of(tmp_path / "bank", LongMemEvalSystem(), sessions, chat) as bank:
        keys = keys_of(bank)
        assert keys[0] == f"Somebody owns a submarine. {turn_text(sessions[0].turns[0])}"
        assert len(keys) == 12
        retrieval = bank.retrieve(Query("what happened then?"), k=6)
        assert retrieval.trace["range"] == ["2021-12-24", "2021-12-25"]
        assert set(ids(retrieval)[:2]) == {("D1:1", "D1:2"), ("D2:1", "D2:2")}


def test_options_that_do_not_fit_and_dialogues_without_facts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs LoCoMo's file"):
        LongMemEvalSystem(source="replay")
    path, _ = annotated(tmp_path, talk(9, 1))
    with pytest.raises(DataError, match="no facts of this dialogue"):
        LongMemEvalSystem(source="replay", annotations=path).open(tmp_path / "bank", "other", services())


def test_the_judge_of_the_benchmark_and_its_file_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three questions about one session: of time, of taste, and one that has no answer."""
    use_words(monkeypatch.setattr)
    talk = [{"role": "user", "content": "I like quiet parks."}, {"role": "assistant", "content": "I see."}]
    kinds = {"q1": "temporal-reasoning", "q2": "single-session-preference", "q3_abs": "multi-session"}
    about = {"haystack_dates": ["2023/05/20 (Sat) 02:21"], "haystack_session_ids": ["s1"], "answer_session_ids": ["s1"]}
    about |= {"answer": "gold", "question_date": "2023/06/01 (Thu) 10:00", "haystack_sessions": [talk]}
    rows = [
        {"question_id": name, "question_type": kind, "question": f"What of {name}?", **about}
        for name, kind in kinds.items()
    ]
    path = tmp_path / "lme.json"
    path.write_text(json.dumps(rows))
    asked = Counter[str]()

    def serve(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        roles = ("too many or one too few", "satisfies the rubric", "recognises that")
        role = next((words for words in roles if words in body["messages"][0]["content"]), None)
        asked[str(role)] += 1
        verdict = f'{{"verdict": {"false" if "rubric" in str(role) else "true"}}}'
        return 200, {}, completion("a quiet park" if role is None else verdict)

    with Proxy(answer=serve) as server:
        llm = LLMConfig(EndpointConfig("m", server.url), cache=None)
        given = {"k": [1], "budgets": [], "judge": "longmemeval", "export": "official"}
        out = run_memory(RunMemoryConfig(str(path), str(tmp_path / "run"), ["bm25"], llm=llm, **given))  # type: ignore[arg-type]
    assert list(asked.values()) == [12, 4, 4, 4]
    official = ScoreOfficialConfig(str(out / "bm25" / "hypotheses.jsonl"), str(tmp_path / "scores"), str(path))
    scores, report = score_official(official), json.loads((out / "bm25" / "report.json").read_text())
    assert scores["overall"]["value"] == report["overall"]["accuracy"]["value"] == pytest.approx(2 / 3)
    assert scores["abstention"]["value"] == 1
