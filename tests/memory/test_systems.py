"""The registry of memory systems: names, options, the paper's figures, and that each entry works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from remind.core.cli import parse
from remind.core.errors import ConfigError
from remind.data.dialogue import Session, Turn
from remind.memory.base import Query, Services
from remind.memory.config import Limit, RunMemoryConfig
from remind.memory.systems import ROWS, SYSTEMS, TABLE_1, make_system, title
from remind.models.encoder import SentenceEncoder

TALK = (
    Session("s1", "2024-01-01", (Turn("a", "Ana", "I bought a red kayak."), Turn("b", "Ben", "Where do you paddle?"))),
    Session("s2", "2024-02-01", (Turn("c", "Ana", "The vet saw our cat."), Turn("d", "Ben", "Is she well again?"))),
)
#: What the first memory for a question about the kayak is made of.
FIRST = {"newest": {"d"}, **{name: {"a", "b"} for name in ("round", "session", "lme_round")}}
#: What does without a chat model.
ALONE = [
    *("dense", "bm25", "hybrid", "round", "session", "newest", "remind", "remind_hybrid", "lme_round", "lme_time"),
    *("rmm_lexical", "rmm_residual"),
]


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


def test_what_needs_a_chat_model_says_so(tmp_path: Path, encoder: SentenceEncoder) -> None:
    said = r"^mem0 needs a chat model \(extract\); name one: --llm.default.base_url"
    bank = make_system("mem0").open(tmp_path / "bank", "talk", Services(encoder))
    with bank, pytest.raises(ConfigError, match=said):
        bank.ingest(TALK[0])


@pytest.mark.parametrize(
    ("system", "options", "said"),
    [
        ("denser", {}, "no memory system 'denser'; there are dense, bm25"),
        ("dense", {"uni": "turn"}, "dense has no option 'uni'; there are unit, method, keys"),
        ("remind_x1", {}, "remind_x1.sae: Field required"),
        ("remind", {"perception": {"retrieve": {"share": 1}}}, "remind.perception.retrieve has no option 'share'"),
    ],
)
def test_what_cannot_be_made_is_refused(system: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        make_system(system, options)


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", page.split("## Systems")[1].split("## ")[0], re.MULTILINE))
    assert rows == {name: entry.help for name, entry in SYSTEMS.items()}


def test_the_papers_protocol_names_every_system_and_its_k() -> None:
    folder, names = Path(__file__).parents[2] / "configs" / "paper", ["memory", "baselines"]
    words = [word for name in names for word in ("--config", str(folder / f"{name}.yaml"))]
    systems, trained = (parse(RunMemoryConfig, "", words[:end]) for end in (2, 4))
    rows = {ROWS[title(name)] for name in (*systems.systems, *trained.systems, "full_context")}
    assert rows == set(TABLE_1)
    assert systems.reader == trained.reader == "x0"
    assert {*systems.limits} == {*systems.systems}
    assert (systems.limits["amem"], systems.limits["remind"]) == (Limit(k=10), Limit(budget=7600))
    assert (systems.llm.default.price_prompt, systems.llm.default.price_completion) == (0.15, 0.6)
    assert {*trained.models} == {*trained.systems}
    assert trained.models["DS-Distill-Qwen-14B"].thought_tokens > 0
    assert trained.llm_of("mem1").endpoint("judge") == systems.llm.judge
    assert [title(name) for name in systems.systems[-2:]] == ["REMIND as printed", "REMIND as recommended"]
