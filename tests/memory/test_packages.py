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
from fault_proxy import Proxy
from on_loopback import SECRET
from remembering import PACKAGES, answer, each_package, installed, locomo, sessions
from scripted import dump, held, minilm

from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.bank import Bank
from remind.memory.base import Query, Services
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
def serving(folder: Path) -> Iterator[tuple[Any, Any]]:
    """A scripted server, and services whose requests a meter passes on to it."""
    with Proxy(answer=answer) as proxy:
        llm = LLMConfig(EndpointConfig("m", proxy.url), cache=str(folder / "cache.sqlite"))
        meter = Meter(llm)
        yield proxy, Services(minilm(), meter.chat, meter.client)


def bank(folder: Path, name: str, given: Services, **options: Any) -> Bank:
    return make_system(name, options).open(folder, "d", given)


@each_package
def test_memories_provenance_and_state(name: str, tmp_path: Path) -> None:
    """Memories and sources are those counted by hand; asking changes nothing; so does going on in another process,
    which pays for nothing twice."""
    with serving(tmp_path) as (proxy, given):
        with bank(tmp_path / "at once", name, given) as memory:
            assert memory.retrieve(Query("Where is Bob?"), k=3).memories == ()
            memory.ingest(FIRST)
            memory.ingest(FIRST)
            memory.ingest(LATER)
            assert held(memory) == EXPECTED[name]
            assert memory.report()["degraded"] == {}
            before = dump(memory)
            found = memory.retrieve(Query("Bob moved to Oslo"), k=1).memories
            assert [(one.text, one.time) for one in found] == [("Bob lives in Oslo", "2023-06-01")]
            assert dump(memory) == before
            assert [file.name for file in memory.folder.rglob("*")] == ["bank.sqlite"]
        hits = proxy.hits
        for session in (FIRST, LATER):
            with bank(tmp_path / "in parts", name, given) as memory:
                memory.ingest(session)
        with bank(tmp_path / "in parts", name, given) as memory:
            assert dump(memory) == before
            assert memory.retrieve(Query("Bob moved to Oslo"), k=1).memories == found
        assert proxy.hits == hits


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
        assert unit["failed"] is None
        assert unit["system"] not in names or (unit["rows"][0]["top"] and not unit["report"]["degraded"])
    for event, arguments, modules in seen["events"]:
        own = "127.0.0.1" in arguments or "localhost" in arguments
        # the standard library and torch look for libraries and processors
        asks = {"ctypes.util", "platform"} & set(modules) or "lscpu" in arguments
        assert own if event.startswith("socket.") else asks, (event, arguments, modules)
    asked, again = seen["hits"]
    assert asked == again > 4
    told = json.dumps([seen["heads"], seen["bodies"]])
    assert (SECRET in told, "GOLD" in told, "GOLD" in json.dumps(locomo())) == (False, False, True)
    banks = [file.read_bytes() for file in (tmp_path / "run" / "memory" / "banks").rglob("*") if file.is_file()]
    assert banks
    assert not any(word in content for content in banks for word in (SECRET.encode(), b"GOLD"))
    assert find_spec("mem0") is None or not (tmp_path / ".mem0").exists()
