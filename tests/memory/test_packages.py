"""Packages of others behind the interface: what they keep, where it comes from, what goes wrong, and what they see."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Answer, Proxy, completion, error
from on_loopback import SECRET
from remembering import (
    FACTS,
    PACKAGES,
    answer,
    calls,
    each_package,
    installed,
    locomo,
    said,
    sessions,
    shown,
)
from scripted import held, minilm, services

from remind.core.errors import ConfigError, DataError
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.base import Bank, Query, Services
from remind.memory.meter import Meter
from remind.memory.packages import PackageBank
from remind.memory.systems import make_system

pytestmark = pytest.mark.usefixtures("quick")

FIRST, LATER = sessions()
#: All that a manager which only adds has in the end.
ADDED = {
    "Ann has a cat": ("s1:1", "s1:2"),
    "Bob lives in Rome": ("s1:1", "s1:2"),
    "Ann has a cat called Tom": ("s1:3",),
    "Bob lives in Oslo": ("s2:1", "s2:2"),
}
EXPECTED = {"mem0_today": ADDED, "langmem": {"Bob lives in Oslo": ("s1:1", "s1:2", "s2:1", "s2:2")}}


@contextmanager
def serving(folder: Path, play: Answer = answer, retries: int = 0, **faults: Any) -> Iterator[tuple[Any, Any]]:
    """A scripted server, and services whose requests a meter passes on to it."""
    with Proxy(answer=play, **faults) as proxy:
        llm = LLMConfig(EndpointConfig("m", proxy.url, retries=retries), cache=str(folder / "cache.sqlite"))
        with Meter(llm) as meter:
            yield proxy, Services(minilm(), meter.chat, meter.url)


def bank(folder: Path, name: str, given: Services, **options: Any) -> Bank:
    return make_system(name, options).open(folder, "d", given)


@each_package
def test_memories_provenance_and_state(name: str, tmp_path: Path) -> None:
    """Memories and sources are those counted by hand; asking changes nothing; so does going on in another process,
    which pays for nothing twice."""
    with serving(tmp_path) as (proxy, given):
        with bank(tmp_path / "at once", name, given) as memory:
            assert memory.retrieve(Query("Where is Bob?"), k=3).memories == ()
            assert memory.ingest(FIRST).added == len(memory.store.numbers())
            assert memory.ingest(FIRST).known
            memory.ingest(LATER)
            assert held(memory) == EXPECTED[name]
            assert memory.report()["degraded"] == {}
            before = list(memory.store.dump())
            found = memory.retrieve(Query("Bob moved to Oslo"), k=1).memories
            assert [(one.text, one.time) for one in found] == [("Bob lives in Oslo", "2023-06-01")]
            assert 0 < memory.retrieve(Query("Bob lives somewhere"), k=3, budget=9).tokens <= 9
            assert list(memory.store.dump()) == before
            assert [file.name for file in memory.folder.rglob("*")] == ["bank.sqlite"]
        hits = proxy.hits
        for session in (FIRST, LATER):
            with bank(tmp_path / "in parts", name, given) as memory:
                memory.ingest(session)
        with bank(tmp_path / "in parts", name, given) as memory:
            assert list(memory.store.dump()) == before
            assert memory.retrieve(Query("Bob moved to Oslo"), k=1).memories == found
            memory.forget(["s2:1", "s2:2"])
            left = {"Ann has a cat called Tom": ("s1:1", "s1:2", "s1:3"), "Bob lives in Rome": ("s1:1", "s1:2")}
            assert held(memory) == (left if name == "langmem" else dict(list(ADDED.items())[:3]))
            assert {one.text for one in memory.retrieve(Query("cat in Rome"), k=9).memories} <= set(held(memory))
        assert proxy.hits == hits


@each_package
def test_a_session_is_remembered_whole_or_not_at_all(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as (_, given), bank(tmp_path / "b", name, given) as memory:
        memory.ingest(FIRST)
        before = list(memory.store.dump())
        with monkeypatch.context() as patch:

            def full(*_: object) -> None:
                raise DataError("the disk is full")

            # after the package has changed what it holds
            patch.setattr(memory.store, "add", full)
            with pytest.raises(DataError, match="full"):
                memory.ingest(LATER)
        assert list(memory.store.dump()) == before
        memory.ingest(LATER)
        assert held(memory) == EXPECTED[name]


@each_package
def test_a_lost_batch_is_told_and_repaired(name: str, tmp_path: Path) -> None:
    down = True

    def play(body: dict[str, Any]) -> Any:
        return error(500, "overloaded") if down and "Oslo" in said(body) else answer(body)

    with serving(tmp_path, play) as (_, given), bank(tmp_path / "b", name, given) as memory:
        assert memory.ingest(FIRST).degraded == ()
        (line,) = memory.ingest(LATER).degraded
        assert line.startswith("extract: ")
        assert "overloaded" in line
        assert not any("Oslo" in text for text in held(memory))
        down = False
        assert memory.repair()
        assert held(memory) == EXPECTED[name]
        assert not memory.repair()


@each_package
def test_memories_are_found_as_the_package_finds_them(name: str, tmp_path: Path) -> None:
    with serving(tmp_path) as (_, given), bank(tmp_path / "b", name, given) as memory:
        for session in (FIRST, LATER):
            memory.ingest(session)
        for text in ("Where does Bob live?", "What is the cat\n called?", "Who sings?"):
            found = [(int(one.id[1:]), one.score) for one in memory.retrieve(Query(text), k=9).memories]
            assert isinstance(memory, PackageBank)
            package = memory.load()
            if name == "langmem":
                theirs = [(int(item.key), item.score) for item in package.store.search(("memories",), query=text)]
            else:
                rows = package.search(text, top_k=9, filters={"user_id": "dialogue"}, threshold=0.1)["results"]
                theirs = [(uuid.UUID(row["id"]).int, row["score"]) for row in rows]
            assert [number for number, _ in found] == [number for number, _ in theirs]
            assert [score for _, score in found] == pytest.approx([score for _, score in theirs], abs=1e-6)


@each_package
def test_faults_behind_the_meter_change_nothing(name: str, tmp_path: Path) -> None:
    kinds = ("rate", "broken", "cut", "malformed")
    dumps = []
    for place, share in enumerate((0.0, 0.3)):
        (tmp_path / str(place)).mkdir()
        with serving(tmp_path / str(place), retries=20, share=share, seed=3, faults=kinds) as (proxy, given):
            with bank(tmp_path / str(place) / "b", name, given) as memory:
                for session in (FIRST, LATER):
                    assert memory.ingest(session).degraded == ()
                dumps.append(list(memory.store.dump()))
            assert bool(proxy.faults) == (share > 0)
            assert max(proxy.paid.values()) == 1
    assert dumps[0] == dumps[1]


@pytest.mark.skipif(not installed("mem0_today"), reason="the extra mem0 is not installed")
@pytest.mark.parametrize(
    ("reply", "texts", "told"),
    [
        ('{"memory": []}', [], ""),
        ('```json\n{"memory": [{"text": "a"}]}\n```', ["a"], ""),
        ('{"memory": [{"id": "99", "text": "a", "event": "DELETE", "linked_memory_ids": ["x"]}]}', ["a"], ""),
        ('{"memory": [{"text": "a"}, {"text": "a"}, {"text": ""}, {}]}', ["a"], ""),
        ("no JSON at all", [], "parsing extraction response"),
        ('{"memory": ["a"]}', [], "AttributeError"),
        ('{"memory": [{"text": 5}]}', [], ""),
    ],
)
def test_replies_of_any_shape_to_mem0(reply: str, texts: list[str], told: str, tmp_path: Path) -> None:
    with (
        serving(tmp_path, lambda body: (200, {}, completion(reply))) as (_, given),
        bank(tmp_path / "b", "mem0_today", given, batch=9) as memory,
    ):
        degraded = memory.ingest(FIRST).degraded
        assert held(memory) == dict.fromkeys(texts, ("s1:1", "s1:2", "s1:3"))
        assert len(degraded) == bool(told)
        assert not told or told in degraded[0]


@pytest.mark.skipif(not installed("mem0_today"), reason="the extra mem0 is not installed")
def test_mem0_is_told_the_day_of_the_session(tmp_path: Path) -> None:
    with serving(tmp_path) as (proxy, given):
        with bank(tmp_path / "b", "mem0_today", given) as memory:
            memory.ingest(FIRST)
            memory.ingest(LATER)
        prompts = [body["messages"][-1]["content"] for body in proxy.bodies]
        for prompt, day in zip(prompts, ["2023-05-08", "2023-05-08", "2023-06-01"], strict=True):
            assert f"## Observation Date\n{day}\n\n## Current Date\n{day}\n" in prompt
        # what was said before is shown with what is said now, over sessions and openings of the bank
        earlier = prompts[-1].split("## Last k Messages")[1].split("## ")[0]
        spoken = [line.split(": ", 2)[2] for line in earlier.strip().splitlines()]
        assert spoken == list(FACTS)[:3]
        assert all(body["response_format"] == {"type": "json_object"} for body in proxy.bodies)


@pytest.mark.skipif(not installed("langmem"), reason="the extra langmem is not installed")
@pytest.mark.parametrize("kind", ["words", "unknown id", "unknown tool", "bad arguments", "wrong type"])
def test_replies_of_any_shape_to_langmem(kind: str, tmp_path: Path) -> None:
    """What cannot be done is not done, and what was there stays."""

    def play(body: dict[str, Any]) -> Any:
        if "Rome" in said(body):
            return answer(body)
        assert shown(body) or kind == "words"
        return {
            "words": (200, {}, completion("There is nothing to remember.")),
            "unknown id": calls(("RemoveDoc", {"json_doc_id": "0" * 32})),
            "unknown tool": calls(("Forget", {"all": True})),
            "bad arguments": calls(("Memory", '{"content": "half')),
            "wrong type": calls(("Memory", {"content": {"a": 1}})),
        }[kind]

    with serving(tmp_path, play) as (_, given), bank(tmp_path / "b", "langmem", given) as memory:
        memory.ingest(FIRST)
        assert held(memory) == dict(list(ADDED.items())[:2])


@each_package
def test_without_an_endpoint(name: str, tmp_path: Path) -> None:
    with (
        bank(tmp_path / "b", name, services(minilm(), None)) as memory,
        pytest.raises(ConfigError, match=rf"^{name} needs a chat model \(extract\); name one: --llm.default.base_url"),
    ):
        memory.ingest(FIRST)


def test_another_version_of_mem0_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mem0", type(sys)("mem0"))
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.0.11")
    with pytest.raises(ConfigError, match=r"^mem0_today needs mem0ai 2.2 or newer, not 1.0.11: pip install"):
        make_system("mem0_today").about()


def test_nothing_but_loopback_is_asked_and_no_key_or_gold_is_seen(tmp_path: Path) -> None:
    """Of our own systems and of the packages that are installed; where the system allows it, in a process without any
    other network."""
    names = ["mem0", *(name for name in PACKAGES if installed(name))]
    line = [sys.executable, str(Path(__file__).with_name("on_loopback.py")), ",".join(names), str(tmp_path)]
    alone = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    tools_there = shutil.which("unshare") and shutil.which("ip")
    if tools_there and not subprocess.run([*alone, "true"], capture_output=True).returncode:
        line = alone + line
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=500)
    assert process.returncode == 0, process.stderr[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    units = [json.loads(path.read_text()) for path in (tmp_path / "run" / "memory" / "units").rglob("*.json")]
    assert {unit["system"] for unit in units} >= set(names)
    for unit in units:
        # the server knows no topics, so that all requests for these are lost
        assert (unit["failed"] is None) == (unit["system"] != "rmm")
        if unit["system"] in names and unit["failed"] is None:
            assert unit["rows"][0]["top"]
            assert not unit["report"]["degraded"]
    for event, arguments, modules in seen["events"]:
        own = "127.0.0.1" in arguments or "localhost" in arguments
        # the standard library and torch look for libraries and processors
        asks = {"ctypes.util", "platform"} & set(modules) or "lscpu" in arguments
        assert own if event.startswith("socket.") else asks, (event, arguments, modules)
    assert seen["asked"] > 4
    assert seen["again"] == 0
    # packages come by the address, our own systems do not
    assert bool(seen["bodies"]) == (len(names) > 1)
    told = json.dumps([seen["heads"], seen["bodies"]])
    assert SECRET not in told
    assert "GOLD" not in told
    assert "GOLD" in json.dumps(locomo())
    banks = [file.read_bytes() for file in (tmp_path / "run" / "memory" / "banks").rglob("*") if file.is_file()]
    assert banks
    assert not any(word in content for content in banks for word in (SECRET.encode(), b"GOLD"))
    assert find_spec("mem0") is None or not (tmp_path / ".mem0").exists()
