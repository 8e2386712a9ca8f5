"""Runs of memory systems that are killed anywhere while a third of all tries fail, and end as if nothing had been."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sqlite3
import time
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Proxy, completion
from forked import Forked
from remembering import SAID, locomo_file
from scripted import FENCED

from remind.memory.config import ScoreMemoryConfig
from remind.memory.score import read_units, score_memory

RUNNING = Path(__file__).with_name("running.py")
#: Requests under way at once.
AT_ONCE = 2


def play(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """A model whose replies are a function of the prompt: RMM's manager, and a reader that cites."""
    asked = "\n".join(str(message["content"]) for message in body["messages"])
    given = {name: text for name, _, text in FENCED.findall(asked)}
    chance = zlib.crc32(json.dumps(given).encode())
    said: Any
    if "extracted_memories" in asked:
        turns = re.split(r"^Turn \d+:\n", given["conversation"], flags=re.MULTILINE)[1:]
        own = [n for n, text in enumerate(turns) if f"{given['speaker']}: " in text]
        said = {"extracted_memories": [{"summary": f"{given['speaker']}, {turns[n]}", "reference": [n]} for n in own]}
    elif "Merge(" in asked:
        said = "Add()" if chance % 2 else f"Merge(0, {json.loads(given['new'])['new_summary']} And more.)"
    else:
        count = len(json.loads(given["memories"]))
        said = f"answer {chance % 97}" + (f" [{chance % count}, {chance % 3}]" if count else " [NO_CITE]")
    return 200, {}, completion(said if isinstance(said, str) else json.dumps(said))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    asked = [
        {"question": line, "evidence": [f"D{n}:{m}"], "category": 4, "answer": f"answer {n}"}
        for n, lines in enumerate(SAID, start=1)
        for m, line in enumerate(lines, start=1)
    ]
    return locomo_file(tmp_path / "talk.json", ("one", "two"), SAID, asked)


def words(data: Path, out: Path, url: str) -> list[str]:
    """The options of a run."""
    given = {
        "input": data,
        "out": out,
        "systems": "[dense, rmm]",
        "options": "{rmm: {reranker: {batch: 2, top_k: 6}, scope: shared}}",
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
    }
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def ended(out: Path) -> dict[str, Any]:
    """What a run has come to: answers, banks and units as they are, and scores, less what tells time."""
    scores = score_memory(ScoreMemoryConfig(str(out), str(out.with_suffix(".json")), resamples=20))
    for cost in scores["costs"]:
        for name in ("p50_ms", "p95_ms", "bytes"):
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
    with closing(sqlite3.connect(out.with_suffix(".sqlite"))) as database:
        return int(database.execute("SELECT count(*) FROM replies").fetchone()[0])


@pytest.mark.slow
def test_runs_killed_at_random_end_alike_and_pay_for_no_reply_twice(data: Path, tmp_path: Path) -> None:
    """A third of all tries fail besides."""
    with Proxy(answer=play) as calm:
        process = Forked(RUNNING, *words(data, tmp_path / "whole", calm.url))
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    whole, out, draw = ended(tmp_path / "whole"), tmp_path / "out", random.Random(3)
    kills, killed = int(os.environ.get("REMIND_KILLS", "1")), 0
    with Proxy(answer=play, share=0.3, seed=7, faults=("rate", "broken", "cut", "malformed")) as proxy:
        for left in range(kills, 0, -1):
            process = Forked(RUNNING, *words(data, out, proxy.url))
            enough = draw.uniform(0.5, 1) * (calm.hits - proxy.paid.total()) / left
            enough += proxy.hits
            while process.poll() is None and proxy.hits < enough:
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.05))
            process.kill()
            _, errors = process.communicate()
            assert process.returncode in (-signal.SIGKILL, 0), errors
            killed += process.returncode != 0
            while proxy.busy:
                time.sleep(0.002)
        process = Forked(RUNNING, *words(data, out, proxy.url))
        _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert killed
    assert ended(out) == whole
    # what was under way when a process died is all that can be paid for again
    assert proxy.paid.total() - kept(out) <= AT_ONCE * kills
    assert kept(out) == kept(tmp_path / "whole") == len(calm.paid)
    assert not [path for path in out.rglob("*") if path.name.endswith((".tmp", ".old"))]
    assert whole["rmm", "two"][-1]["trace"]["updates"] == 4
    assert proxy.faults.total() > 10
    assert set(calm.paid) == set(proxy.paid)
