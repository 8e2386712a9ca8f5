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
from remembering import locomo_dialogue

from remind.memory.config import ScoreMemoryConfig
from remind.memory.score import read_units, score_memory

RUNNING = Path(__file__).with_name("running.py")
#: Requests under way at once.
AT_ONCE = 2
_FENCED = re.compile(r"<<<(\w+) ([0-9a-f]{8})\n(.*?)\n\1 \2>>>", re.DOTALL)
_SAID = [
    ["I adopted a dog called Rex.", "How lovely, a puppy!", "He is two years old."],
    ["We moved to Lisbon in May.", "Is it warm there?", "Very warm, and the tiles are blue."],
]


def play(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A model whose replies are a function of the prompt: Mem0's and RMM's managers, and a reader that
    cites."""
    asked = "\n".join(str(message["content"]) for message in body["messages"])
    given = {name: text for name, _, text in _FENCED.findall(asked)}
    chance = zlib.crc32(json.dumps(given).encode())
    said: Any
    if "extracted_memories" in asked:
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
    rmm = {"reranker": {"batch": 2, "top_k": 6}, "scope": "shared"}
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
    for unit in read_units(out):
        assert unit["failed"] is None
        for row in unit["rows"]:
            del row["ms"]
        found[unit["system"], unit["dialogue"]] = unit["rows"]
    for path in sorted((out / "memory" / "banks").rglob("bank.sqlite")):
        with closing(sqlite3.connect(path)) as database:
            found[str(path.relative_to(out))] = [*database.iterdump()]
    found["weights"] = (out / "memory" / "learned" / "rmm" / "reranker.safetensors").read_bytes()
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
