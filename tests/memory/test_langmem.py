"""The package langmem, played by a script: what is kept, where it comes from, and how it is found."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Proxy, completion
from scripted import dump, held, minilm, session

from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.base import Query, Services
from remind.memory.meter import Meter
from remind.memory.systems import make_system

pytestmark = [
    pytest.mark.usefixtures("quick"),
    pytest.mark.skipif(find_spec("langmem") is None, reason="the extra langmem is not installed"),
]
FIRST = session("s1", "2023-05-08", "Ann: I have a cat.", "Bob: I live in Rome.", "Ann: The cat is called Tom.")
LATER = session("s2", "2023-06-01", "Ann: Tom the cat ran away.", "Bob: I moved to Oslo.")
#: What a manager makes of each line, and of which memory it is another version. No text: that one is gone.
FACTS: dict[str, tuple[str | None, str | None]] = {
    "I have a cat.": ("Ann has a cat", None),
    "I live in Rome.": ("Bob lives in Rome", None),
    "The cat is called Tom.": ("Ann has a cat called Tom", "Ann has a cat"),
    "Tom the cat ran away.": (None, "Ann has a cat called Tom"),
    "I moved to Oslo.": ("Bob lives in Oslo", "Bob lives in Rome"),
}
_HELD = re.compile(r'<instance id=(\w+) schema_type="Memory">\n(.*?)\n</instance>', re.DOTALL)


def play(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Calls the tools for what the batch at hand tells; a pure function of the request."""
    told = body["messages"][-1]["content"].split("<session_")[-1]
    shown = _HELD.findall(body["messages"][0]["content"])
    ids, made = {ast.literal_eval(value)["content"]: name for name, value in shown}, list[tuple[str, Any]]()
    for text, before in (fact for line, fact in FACTS.items() if line in told):
        if before not in ids:
            made += [("Memory", {"content": text})] if text else []
        elif text:
            patch = [{"op": "replace", "path": "/content", "value": text}]
            made.append(("PatchDoc", {"json_doc_id": ids[before], "planned_edits": "", "patches": patch}))
        else:
            made.append(("RemoveDoc", {"json_doc_id": ids[before]}))
    reply = json.loads(completion("Nothing to remember."))
    if made:
        calls = [
            {"id": f"call_{n}", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
            for n, (name, given) in enumerate(made)
        ]
        reply["choices"][0]["message"] |= {"content": None, "tool_calls": calls}
    return 200, {}, json.dumps(reply).encode()


@pytest.fixture
def given(tmp_path: Path) -> Iterator[tuple[Proxy, Services]]:
    """A scripted server, and services whose requests a meter passes on to it."""
    with Proxy(answer=play) as proxy:
        meter = Meter(LLMConfig(EndpointConfig("m", proxy.url), cache=str(tmp_path / "cache.sqlite")))
        yield proxy, Services(minilm(), meter.chat, meter.client)


def test_memories_provenance_and_state(given: tuple[Proxy, Services], tmp_path: Path) -> None:
    """Asking changes nothing; so does going on in another process, which pays for nothing twice."""
    proxy, services = given
    system = make_system("langmem")
    with system.open(tmp_path / "at once", "d", services) as bank:
        assert bank.retrieve(Query("Where is Bob?"), k=3).memories == ()
        for one in (FIRST, FIRST, LATER):
            bank.ingest(one)
        assert held(bank) == {"Bob lives in Oslo": ("s1:1", "s1:2", "s2:1", "s2:2")}
        assert bank.report()["degraded"] == {}
        before = dump(bank)
        (found,) = bank.retrieve(Query("Bob moved to Oslo"), k=1).memories
        assert (found.text, found.time) == ("Bob lives in Oslo", "2023-06-01")
        assert dump(bank) == before
    hits = proxy.hits
    for one in (FIRST, LATER):
        with system.open(tmp_path / "in parts", "d", services) as bank:
            bank.ingest(one)
    with system.open(tmp_path / "in parts", "d", services) as bank:
        assert dump(bank) == before
    assert proxy.hits == hits


def test_memories_are_found_as_the_package_finds_them(given: tuple[Proxy, Services], tmp_path: Path) -> None:
    with make_system("langmem").open(tmp_path / "b", "d", given[1]) as bank:
        bank.ingest(FIRST)
        for text in ("Where does Bob live?", "What is the cat\n called?", "Who sings?"):
            found = [(one.id, one.score) for one in bank.retrieve(Query(text), k=9).memories]
            theirs = bank.load().store.search(("memories",), query=text)
            assert [name for name, _ in found] == [f"m{item.key}" for item in theirs]
            assert [score for _, score in found] == pytest.approx([item.score for item in theirs], abs=1e-6)
