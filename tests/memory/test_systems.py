"""The registry of memory systems: names, options, the paper's figures, and that each entry works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from remind.core.errors import ConfigError
from remind.data.dialogue import Session, Turn
from remind.memory.base import Query, Services
from remind.memory.systems import SYSTEMS, make_system
from remind.models.encoder import SentenceEncoder

TALK = (
    Session("s1", "2024-01-01", (Turn("a", "Ana", "I bought a red kayak."), Turn("b", "Ben", "Where do you paddle?"))),
    Session("s2", "2024-02-01", (Turn("c", "Ana", "The vet saw our cat."), Turn("d", "Ben", "Is she well again?"))),
)
#: What the first memory for a question about the kayak is made of.
FIRST = {"newest": {"d"}, **{name: {"a", "b"} for name in ("round", "session", "lme_round")}}
#: What asks a chat model, and what does without.
ALONE = [
    *("dense", "bm25", "hybrid", "round", "session", "newest", "remind", "remind_hybrid", "lme_round", "lme_time"),
    *("rmm_lexical", "rmm_residual"),
]
ELSEWHERE = ("remind_recommended", "remind_x1", "lme_facts", "mem0_today", "langmem")
ASKING = [name for name in SYSTEMS if name not in (*ALONE, *ELSEWHERE)]


@pytest.mark.parametrize("name", ALONE)
def test_each_system_remembers_and_finds(name: str, tmp_path: Path, encoder: SentenceEncoder) -> None:
    with make_system(name).open(tmp_path / "bank", "talk", Services(encoder)) as bank:
        for session in TALK:
            bank.ingest(session)
        bank.finish()
        memories = bank.retrieve(Query("Who has a red kayak?"), k=1).memories
        found = {source for memory in memories for source in memory.sources or ()}
        assert bank.report()["sessions"] == 2
    assert found == FIRST.get(name, {"a"})


@pytest.mark.parametrize("name", ASKING)
def test_what_needs_a_chat_model_says_so(name: str, tmp_path: Path, encoder: SentenceEncoder) -> None:
    made, said = make_system(name), rf"^{name} needs a chat model \(\w+\); name one: --llm.default.base_url"
    with made.open(tmp_path / "bank", "talk", Services(encoder)) as bank, pytest.raises(ConfigError, match=said):
        for session in TALK:
            bank.ingest(session)
        bank.finish()
        bank.retrieve(Query("Who has a red kayak?"), k=1)


@pytest.mark.parametrize(
    ("system", "options", "said"),
    [
        ("denser", {}, "no memory system 'denser'; there are dense, bm25"),
        ("dense", {"uni": "turn"}, "dense has no option 'uni'; there are unit, method, keys"),
        ("dense", {"unit": "page"}, "dense.unit: Input should be 'turn', 'round' or 'session', not 'page'"),
        ("remind_x1", {}, "remind_x1.sae: Field required"),
        ("remind", {"perception": {"retrieve": {"share": 1}}}, "remind.perception.retrieve has no option 'share'"),
    ],
)
def test_what_cannot_be_made_is_refused(system: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_system(system, options)


def test_prompts_of_a_package_that_is_missing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: ())
    with pytest.raises(ConfigError, match="those of mem0ai 1"):
        make_system("mem0", {"prompts": "official"}).about()


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page.split("## Systems")[1].split("## ")[0], re.MULTILINE))
    assert rows == {name: entry.help for name, entry in SYSTEMS.items()}
