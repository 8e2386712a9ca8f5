"""Runs of memory systems that are killed anywhere while a third of all tries fail, and end as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sqlite3
import time
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Answer, Proxy, completion
from forked import Forked
from remembering import answer, each_package, locomo, locomo_dialogue
from running import use_words

from remind.commands import main
from remind.memory.config import ScoreMemoryConfig
from remind.memory.membuilder import ROLES
from remind.memory.operations import ACTIONS, Operation
from remind.memory.proposals import BANKS
from remind.memory.score import read_units, score_memory
from remind.memory.store import Store

RUNNING = Path(__file__).with_name("running.py")
#: Requests under way at once.
AT_ONCE = 2
_FENCED = re.compile(r"<<<(\w+) ([0-9a-f]{8})\n(.*?)\n\1 \2>>>", re.DOTALL)
_SAID = [
    ["I adopted a dog called Rex.", "How lovely, a puppy!", "He is two years old."],
    ["We moved to Lisbon in May.", "Is it warm there?", "Very warm, and the tiles are blue."],
]
#: What a prompt says of whom it is for: the roles of MemBuilder and SaliMory.
_ROLES = re.compile(
    r"the (core) block|the (episodic|semantic|procedural) store|You (shorten) the profile|worth (remembering)|"
    r"a memory (up) to date|You (prepare) what"
)


def play(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A model whose replies are a function of the prompt: Mem0's and RMM's managers, the roles of MemBuilder and
    SaliMory, and a reader that cites."""
    asked = "\n".join(str(message["content"]) for message in body["messages"])
    given = {name: text for name, _, text in _FENCED.findall(asked)}
    chance = zlib.crc32(json.dumps(given).encode())
    said: Any
    if role := _ROLES.search(asked):
        said = written(role[role.lastindex or 0], given, chance)
    elif "extracted_memories" in asked:
        turns = re.split(r"^Turn \d+:\n", given["conversation"], flags=re.MULTILINE)[1:]
        own = [n for n, text in enumerate(turns) if f"{given['speaker']}: " in text]
        said = {"extracted_memories": [{"summary": f"{given['speaker']}, {turns[n]}", "reference": [n]} for n in own]}
    elif "Merge(" in asked:
        said = "Add()" if chance % 2 else f"Merge(0, {json.loads(given['new'])['new_summary']} And more.)"
    elif '{"facts": ' in asked:
        said = {"facts": [line for line in given["conversation"].splitlines() if line.startswith(given["person"])]}
    elif '{"memory": ' in asked:
        entries = [json.loads(line) for line in given.get("entries", "").splitlines()]
        facts = [json.loads(line) for line in given["facts"].splitlines()]
        said = {"memory": [{"id": f"n{n}", "text": fact, "event": "ADD"} for n, fact in enumerate(facts)]}
        if entries and chance % 3:
            said["memory"][0] |= {"id": entries[0]["id"], "event": ("UPDATE", "DELETE")[chance % 2]}
    else:
        count = len(json.loads(given["memories"]))
        said = f"answer {chance % 97}" + (f" [{chance % count}, {chance % 3}]" if count else " [NO_CITE]")
    return 200, {}, completion(said if isinstance(said, str) else json.dumps(said))


def written(role: str, given: dict[str, str], chance: int) -> Any:
    """What a role makes of a session or turn: entries, and changes of entries that there may not be."""
    entries = given.get("entries", "").splitlines()
    turns = [re.sub(r"^\d+\. ", "", line) for line in (given.get("turn") or given.get("session", "")).splitlines()]
    # of four references one is to an entry that there is not
    old, place = 1 + chance % len(entries) if entries and chance % 4 else 99, chance % max(len(turns), 1)
    text = "".join(turns[place : place + 1])
    if role == "shorten":
        return given["block"][-20:]
    if role == "remembering":
        return {"salient": chance % 5 > 0}
    if role == "prepare":
        return {"profile": f"profile {chance % 97} of {entries[0]}", "used": [1, old]}
    if role == "up":
        made: dict[str, Any] = {"op": "ADD", "store": BANKS[chance % 3], "text": text}
        found = re.search(r"\((\w+)\)", "".join(entries[old - 1 : old]))
        change = {"store": found[1] if found else "fact", "target": old}
        changed = {"op": "UPDATE", **change, "text": f"{text} So it is."} if chance % 2 else {"op": "DELETE", **change}
        return {"ops": [made, changed if entries else {"op": "NOOP"}]}
    if role == "core":
        block = given.get("block", "")
        ops: list[dict[str, Any]] = [
            {"op": "REPLACE", "old_text": block.partition(" ")[0], "new_text": text},
            {"op": "REWRITE", "content": text},
        ]
        ops = [ops[chance % 2]] if block else [{"op": "APPEND", "content": text}]
    else:
        when = "2023-05: " if role == "episodic" else ""
        ops = [{"op": "ADD", "memory": f"{when}{text}"}]
        if entries:
            ops.append({"op": "UPDATE", "old": old, "new_memory": f"{when}{text} Again."})
        if entries and role == "episodic":
            ops.append({"op": "MERGE", "olds": [1], "new_memory": f"{when if chance % 2 else ''}{text} And so on."})
        if role == "semantic":
            ops.append({"op": "SKIP", "reason": "known"})
    return {"ops": [{**op, "sources": [place + 1]} for op in ops]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two dialogues in LoCoMo's format, which differ in a word of each turn."""
    samples = []
    for name in ("one", "two"):
        asked = [
            {"question": f"{line} {name}?", "evidence": [f"D{n}:{m}"], "category": 4, "answer": f"answer {n}"}
            for n, lines in enumerate(_SAID, start=1)
            for m, line in enumerate(lines, start=1)
        ]
        samples.append(locomo_dialogue(name, [[f"{line} {name}" for line in lines] for lines in _SAID], asked))
    path = tmp_path / "talk.json"
    path.write_text(json.dumps(samples))
    return path


def words(data: Path, out: Path, url: str, **more: Any) -> list[str]:
    """The options of a run."""
    rmm = {"reranker": {"batch": 2, "top_k": 6}, "scope": "shared", "weights": str(out.with_suffix(".weights"))}
    given = {
        "input": data,
        "out": out,
        "systems": "[dense, mem0, rmm]",
        "options": json.dumps({"rmm": rmm}),
        "reader": "cite",
        "k": "[1, 3]",
        "budgets": "[20]",
        "answer_k": 4,
        "llm.default.model": "m",
        "llm.default.base_url": url,
        "llm.default.name": "test",
        "llm.default.retries": 50,
        "llm.default.concurrency": AT_ONCE,
        "llm.default.price_prompt": 1e6,
        "llm.cache": out.with_suffix(".sqlite"),
        **more,
    }
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def ended(out: Path) -> dict[str, Any]:
    """What a run has come to: answers, banks and units as they are, and scores, less what tells time."""
    scores = score_memory(ScoreMemoryConfig(str(out), str(out.with_suffix(".json")), resamples=20))
    for cost in scores["costs"]:
        for name in ("ingest_seconds", "p50_ms", "p95_ms", "bytes"):
            del cost[name]
        for part in ("ingest", "question"):
            # tries, which depend on faults
            del cost[part]["calls"]
    found: dict[str, Any] = {f"scores: {name}": value for name, value in scores.items()}
    for path in sorted((out / "answers").iterdir()):
        found[path.name] = path.read_text()
    for unit in read_units(out):
        assert unit["failed"] is None
        for row in unit["rows"]:
            del row["ms"]
        found[unit["system"], unit["dialogue"]] = unit["rows"]
    for path in sorted((out / "memory" / "banks").rglob("bank.sqlite")):
        with closing(sqlite3.connect(path)) as database:
            ((about,),) = database.execute("SELECT value FROM about")
        identity = json.loads(about)
        del identity["format"]
        with closing(Store(path.parent, identity)) as store:
            found[str(path.relative_to(out))] = [*store.dump()]
    if (weights := out.with_suffix(".weights") / "reranker.safetensors").exists():
        found["weights"] = weights.read_bytes()
    return found


def kept(out: Path) -> int:
    """Replies in the cache of a run."""
    path = out.with_suffix(".sqlite")
    if not path.is_file():
        return 0
    with closing(sqlite3.connect(path)) as database:
        table = database.execute("SELECT count(*) FROM sqlite_master WHERE name = 'replies'").fetchone()[0]
        return int(database.execute("SELECT count(*) FROM replies").fetchone()[0]) if table else 0


def killed(data: Path, tmp_path: Path, play: Answer, **more: Any) -> tuple[dict[str, Any], Proxy, Proxy]:
    """A run that is killed at random while a third of all tries fail, then goes on to its end: what it came to, and
    the servers of an undisturbed run and of this one. Raises AssertionError where the two do not end alike, or a reply
    was paid for twice."""
    with Proxy(answer=play) as calm:
        began = time.monotonic()
        process = Forked(RUNNING, *words(data, tmp_path / "whole", calm.url, **more))
        _, errors = process.communicate(timeout=300)
        took = time.monotonic() - began
    assert process.returncode == 0, errors
    whole = ended(tmp_path / "whole")
    kills, draw, out, done, lost = int(os.environ.get("REMIND_KILLS", "2")), random.Random(3), tmp_path / "out", 0, 0
    with Proxy(answer=play, share=0.3, seed=7, faults=("rate", "broken", "cut", "malformed")) as proxy:
        while done < kills:
            began = time.monotonic()
            process = Forked(RUNNING, *words(data, out, proxy.url, **more))
            late, enough = began + draw.uniform(0.3, 1) * took, proxy.hits + draw.randint(1, calm.hits)
            while process.poll() is None and proxy.hits < enough and time.monotonic() < late:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.05))
            process.kill()
            _, errors = process.communicate()
            assert process.returncode in (-signal.SIGKILL, 0), errors
            while proxy.busy:
                time.sleep(0.002)
            # what was under way when the process died is all that can be paid for again
            before, lost = lost, proxy.paid.total() - kept(out)
            assert lost - before <= AT_ONCE
            if process.returncode:
                done += 1
            else:
                # it was through before the signal came: the same again, of replies that are paid for, which is faster
                took = 0.8 * (time.monotonic() - began)
                assert ended(out) == whole
                shutil.rmtree(out)
                shutil.rmtree(out.with_suffix(".weights"), ignore_errors=True)
        process = Forked(RUNNING, *words(data, out, proxy.url, **more))
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    assert ended(out) == whole
    assert proxy.paid.total() - kept(out) == lost <= AT_ONCE * kills
    assert kept(out) == kept(tmp_path / "whole") == len(calm.paid)
    assert not [path for path in out.rglob("*") if path.name.endswith((".tmp", ".old"))]
    return whole, calm, proxy


@pytest.mark.slow
def test_runs_killed_at_random_end_alike_and_pay_for_no_reply_twice(data: Path, tmp_path: Path) -> None:
    whole, calm, proxy = killed(data, tmp_path, play)
    assert {len(whole[system, name]) for system in ("mem0", "rmm", "dense") for name in ("one", "two")} == {6}
    assert whole["rmm", "two"][-1]["trace"]["updates"] == 4
    assert proxy.faults.total() > 20
    assert set(calm.paid) == set(proxy.paid)


@pytest.mark.slow
def test_killed_runs_of_trained_policies_do_so_too(data: Path, tmp_path: Path) -> None:
    options = json.dumps({"membuilder": {"block_characters": 40, "compressed_characters": 30}})
    whole, calm, proxy = killed(data, tmp_path, play, systems="[membuilder, salimory]", options=options)
    assert all(row["top"] and row["answer"]["text"] for row in whole["salimory", "two"])
    assert proxy.faults.total() > 20
    assert set(calm.paid) == set(proxy.paid)
    banks = [lines for name, lines in whole.items() if str(name).endswith("bank.sqlite")]
    journal = [line.removeprefix("journal ") for lines in banks for line in lines if line.startswith("journal ")]
    log = [Operation.of(json.loads(json.loads(row)[-1])) for row in journal]
    did = {(one.store, one.op) for one in log if one.status == "applied"}
    assert did >= {(role, op) for role in ROLES for op in ACTIONS[role]}
    assert {op for store, op in did if store not in ROLES} == set(ACTIONS["fact"])
    assert any(one.status == "rejected" for one in log)


@each_package
def test_so_do_those_of_packages(name: str, tmp_path: Path) -> None:
    (tmp_path / "talk.json").write_text(json.dumps(locomo()))
    whole, _, proxy = killed(tmp_path / "talk.json", tmp_path, answer, systems=f"[{name}]", options="{}")
    assert all(row["top"] for row in whole[name, "conv-1"])
    assert proxy.faults


def test_shuffled_questions_have_the_same_answers(
    data: Path, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody learns: what a question is answered does not depend on those before it."""
    use_words(monkeypatch.setattr)
    samples = json.loads(data.read_text())
    for sample in samples:
        random.Random(1).shuffle(sample["qa"])
    turned = tmp_path / "turned.json"
    turned.write_text(json.dumps(samples))
    found = []
    with Proxy(answer=play) as proxy:
        for source in (data, turned):
            out = tmp_path / f"{source.stem}-run"
            main(["run-memory", *words(source, out, proxy.url, citer="none")])
            found.append(
                {
                    (unit["system"], row["text"]): (row["top"], row["budgets"], row["answer"])
                    for unit in read_units(out)
                    for row in unit["rows"]
                }
            )
    assert len(found[0]) == 6 * 12
    assert found[0] == found[1]
