"""Who tells what an answer cites, and runs in which systems learn from it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Proxy, completion
from remembering import locomo_dialogue
from running import use_words

from remind.data.dialogue import Question
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.base import Memory
from remind.memory.citers import cited
from remind.memory.config import RunMemoryConfig
from remind.memory.reranker import NAME
from remind.memory.rmm import RmmBank
from remind.memory.run import run_memory
from remind.memory.score import read_units

ASKED = Question("q", "d", "Where did Ann buy her red bicycle?", answers=("Oslo",), evidence=("t1", "t5"))


def memories(*given: tuple[str, tuple[str, ...] | None]) -> list[Memory]:
    return [Memory(f"m{n}", text, "turn", sources, None, 0.0, 3) for n, (text, sources) in enumerate(given)]


def test_who_cites_what() -> None:
    shown = memories(
        ("Ann: I bought the bicycle", ("t3",)),
        ("Ann: it is red", ("t1", "t2")),
        ("Bob: hello", ("t4",)),
        ("Bob: a red bike that Ann buys; a bicycle", None),
    )
    assert cited("oracle", ASKED, shown) == {1}
    # of Ann, buy, red, bicycle two are needed; stems count
    assert cited("lexical", ASKED, shown) == {0, 1, 3}
    assert cited("oracle", ASKED, []) == frozenset()
    blank = Question("q", "d", "Where did Ann buy her red bicycle?")
    assert cited("oracle", blank, shown) is None
    assert cited("noisy", blank, shown) is None
    assert cited("none", ASKED, shown) is None
    assert cited("lexical", blank, shown) == {0, 1, 3}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two dialogues in LoCoMo's format, of 24 turns and 12 questions each."""
    use_words(monkeypatch.setattr)
    samples = []
    for name in ("conv-1", "conv-2"):
        turns = [f"word{n} thing{n % 5} {name}" for n in range(1, 25)]
        asked = [
            {"question": f"Is thing{n % 5} like thing{n % 3}?", "answer": "yes", "evidence": [f"D1:{n}"], "category": 4}
            for n in range(1, 13)
        ]
        samples.append(locomo_dialogue(name, [turns], asked))
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(samples))
    return path


def run(data: Path, out: Path, **changes: Any) -> dict[tuple[str, str], Any]:
    options = {"rmm": {"source": "turns", **changes.pop("rmm", {})}}
    settings: dict[str, Any] = {"systems": ["dense", "rmm"], "k": [1, 5], "budgets": [12], "options": options}
    run_memory(RunMemoryConfig(str(data), str(out), **{**settings, "llm": LLMConfig(cache=None), **changes}))
    return {(unit["system"], unit["dialogue"]): unit for unit in read_units(out)}


# a reader that cites


def helps(text: str) -> bool:
    """Whether the server cites a memory."""
    return "thing1" in text or "thing4" in text


def cite(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    (shown,) = re.findall(r"<<<memories \w+\n(.*?)\nmemories", body["messages"][-1]["content"], re.DOTALL)
    numbers = [row["memory"] for row in json.loads(shown) if helps(row["content"])]
    return 200, {}, completion(f"yes {numbers}" if numbers else "yes [NO_CITE]")


@pytest.fixture
def server(quick: None) -> Iterator[Proxy]:
    with Proxy(answer=cite) as proxy:
        yield proxy


def cited_run(data: Path, out: Path, server: Proxy, **changes: Any) -> dict[tuple[str, str], Any]:
    llm = LLMConfig(EndpointConfig("m", server.url), cache=str(out.parent / "replies.sqlite"))
    return run(data, out, **{"systems": ["rmm"], "llm": llm, "reader": "cite", "answer_k": 7, **changes})


def traced(found: dict[tuple[str, str], Any]) -> dict[str, list[Any]]:
    return {name: [row["trace"] for row in unit["rows"]] for (system, name), unit in found.items() if system == "rmm"}


def test_a_killed_run_hands_weights_on_as_a_whole_one(
    data: Path, tmp_path: Path, server: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"rmm": {"scope": "shared"}}
    whole = cited_run(data, tmp_path / "whole", server, **shared)
    updates = [row["trace"]["updates"] for unit in whole.values() if unit["system"] == "rmm" for row in unit["rows"]]
    # a dialogue goes on with what the one before it has taught
    assert (max(updates[:12]), updates[12], updates[-1]) == (2, 2, 4)
    for kill in (5, 18):
        with monkeypatch.context() as patch:
            learn, count = RmmBank.feedback, iter(range(kill))

            def dies(*given: Any, learn: Any = learn, count: Iterator[int] = count) -> None:
                learn(*given)
                if next(count, None) is None:
                    raise KeyboardInterrupt

            patch.setattr(RmmBank, "feedback", dies)
            with pytest.raises(KeyboardInterrupt):
                cited_run(data, tmp_path / "run", server, **shared)
    assert traced(cited_run(data, tmp_path / "run", server, **shared)) == traced(whole)
    learned, wanted = (tmp_path / name / "memory" / "learned" / "rmm" / NAME for name in ("run", "whole"))
    assert learned.read_bytes() == wanted.read_bytes()
    hits = server.hits
    assert set(server.paid.values()) == {1}
    cited_run(data, tmp_path / "run", server, **shared)
    assert server.hits == hits
    # another run goes on from there
    frozen = {"rmm": {"scope": "frozen", "weights": str(learned.parent)}}
    other = cited_run(data, tmp_path / "other", server, **frozen)
    assert {row["trace"]["updates"] for row in other["rmm", "conv-1"]["rows"]} == {4}
