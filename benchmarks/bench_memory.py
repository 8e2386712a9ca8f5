"""What a memory bank takes: a question at a million vectors, a session by the size of the bank, memory, ingesting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure import about, headline, resident
from remind.core.files import write_json
from remind.core.processes import spawned_pool
from remind.core.progress import track
from remind.data.dialogue import Session, Turn
from remind.data.readers import read
from remind.memory.bank import Bank
from remind.memory.base import Query, Services
from remind.memory.plain import PlainSystem
from remind.models.encoder import SentenceEncoder
from remind.states.pyramid import turn_text

_DIMENSION, _K = 384, 20
#: Turns of a session while banks are filled, where it does not matter.
_FILL = 1000


@dataclass
class BenchMemoryConfig:
    """Fill banks with made-up vectors that have the spectrum of MiniLM's vectors of turns, and measure."""

    vectors: int = 1_000_000
    """Turns of the large bank."""
    small: int = 10_000
    """Turns of the small bank, which sessions are added to in turns with the large one."""
    questions: int = 30
    """Questions asked of the large bank, in turns with a float32 scan of the same vectors."""
    turns: int = 40
    """Turns of a session that is added."""
    sessions: int = 420
    """Sessions that are added to each bank."""
    input: str | None = None
    """Dialogues to ingest with MiniLM, in turns with encoding alone; None: this is left out."""
    limit: int = 40
    """At most this many sessions of them."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""


class Given:
    """An encoder in name: texts end in the number of their vector."""

    name = "given"

    def __init__(self, vectors: Tensor) -> None:
        self.vectors = vectors

    def encode(self, texts: Sequence[str]) -> Tensor:
        return self.vectors[[int(text.rpartition(" ")[2]) for text in texts]]

    encode_apart = encode

    def count_many(self, texts: Sequence[str]) -> list[int]:
        return [len(text) for text in texts]


def made_up(count: int, seed: int = 0, block: int = 1000) -> Tensor:
    """Unit rows [count, 384]; a third of the variance is common to a block.

    The variance of direction j, j^-0.8 exp(-j / 120), is a fit to MiniLM's vectors of 1,347 turns of LoCoMo and
    REALTALK without their mean's direction.
    """
    draw = torch.Generator().manual_seed(seed)
    place = torch.arange(1, _DIMENSION + 1)
    spread = (place**-0.8 * torch.exp(-place / 120)).sqrt()
    turn, _ = torch.linalg.qr(torch.randn(_DIMENSION, _DIMENSION, generator=torch.Generator().manual_seed(0)))
    rows = torch.empty(count, _DIMENSION)
    for part in rows.split(block):
        common = torch.randn(1, _DIMENSION, generator=draw)
        own = torch.randn(len(part), _DIMENSION, generator=draw)
        part[:] = (
            torch.nn.functional.normalize((own * (2 / 3) ** 0.5 + common * (1 / 3) ** 0.5) * spread, dim=-1) @ turn
        )
    return rows


def bench_memory(cfg: BenchMemoryConfig) -> dict[str, Any]:
    """Run, print and return the figures."""
    print(headline(about("torch", "numpy", "safetensors")))
    figures: dict[str, Any] = {}
    if cfg.input is not None:
        figures["ingest"] = ingest(cfg, cfg.input)
        print("ingesting in times of encoding alone: " + _ratio(figures["ingest"]))
    with TemporaryDirectory() as folder:
        added = cfg.sessions * cfg.turns
        rows = made_up(cfg.vectors + added)
        # every question is a turn among the others and half a turn of its own
        picked = torch.randperm(cfg.vectors, generator=torch.Generator().manual_seed(1))[: cfg.questions]
        questions = torch.nn.functional.normalize(rows[picked] + 0.5 * made_up(cfg.questions, 1, 1), dim=-1)
        encoder = Given(rows)
        with _bank(folder, "large", encoder) as large, _bank(folder, "small", encoder) as small:
            for bank, count in ((large, cfg.vectors), (small, cfg.small)):
                for first in track(range(0, count, _FILL), f"fill {bank.folder.name}", -(-count // _FILL)):
                    bank.ingest(_session(first, min(_FILL, count - first)))
            figures["question"] = ask(large, rows[: cfg.vectors], questions)
            figures["session"] = add(small, large, cfg)
            figures["disk_mb"] = large.report()["bytes"] / 2**20
        with spawned_pool(1) as pool:
            figures["memory"] = pool.submit(peak, folder, questions).result()
    asked, session, memory = figures["question"], figures["session"], figures["memory"]
    print(f"a question at {cfg.vectors:,} vectors in float32 scans: {_ratio(asked)}; exact: {asked['exact']}")
    print(f"a session at {cfg.vectors:,} turns in those at {cfg.small:,}: {_ratio(session)}")
    print(f"memory, MB: {memory['before']:.0f} before the bank is opened, {memory['peak']:.0f} at most after questions")
    if cfg.out is not None:
        write_json(cfg.out, figures)
    return figures


def _bank(folder: str | Path, name: str, encoder: Given | SentenceEncoder) -> Bank:
    return PlainSystem("turns").open(Path(folder) / name, "d", Services(encoder))  # type: ignore[arg-type]


def _session(first: int, count: int) -> Session:
    turns = [Turn(str(number), "A", str(number)) for number in range(first, first + count)]
    return Session(f"S{first}", None, tuple(turns))


def ask(bank: Bank, rows: Tensor, questions: Tensor) -> dict[str, Any]:
    """Questions to a bank of these rows and scans of them, in turns."""
    encoder: Any = bank.encoder
    held, encoder.vectors = encoder.vectors, questions
    exact = True
    clock = _Clock("bank", "scan")
    bank.retrieve(Query("question 0"), k=_K)
    for number, vector in enumerate(questions):
        found = clock.run("bank", bank.retrieve, Query(f"question {number}"), _K)
        clock.run("scan", _scan, rows, vector)
        wide = torch.cat([part.double() @ vector.double() for part in rows.split(_FILL)])
        best = np.argsort(-wide.numpy(), kind="stable")[:_K]
        exact &= [memory.sources for memory in found.memories] == [(str(row),) for row in best]
    encoder.vectors = held
    return {**clock.figures(), "exact": exact}


def _scan(rows: Tensor, vector: Tensor) -> Tensor:
    return (rows @ vector).topk(_K).indices


def add(small: Bank, large: Bank, cfg: BenchMemoryConfig) -> dict[str, Any]:
    """The same sessions, new to both, to a small and a large bank, in turns."""
    clock = _Clock("large", "small")
    for number in track(range(cfg.sessions), "add sessions", cfg.sessions):
        session = _session(cfg.vectors + number * cfg.turns, cfg.turns)
        for name, bank in (("small", small), ("large", large))[:: 1 - 2 * (number % 2)]:
            clock.run(name, bank.ingest, session)
    return clock.figures()


def peak(folder: str, questions: Tensor) -> dict[str, float]:
    """Resident memory, in MB, before the large bank is opened, and the most there was after all questions."""
    before = resident("VmRSS") / 2**20
    with _bank(folder, "large", Given(questions)) as bank:
        for number in range(len(questions)):
            bank.retrieve(Query(f"question {number}"), k=_K)
    return {"before": before, "peak": resident("VmHWM") / 2**20}


def ingest(cfg: BenchMemoryConfig, path: str) -> dict[str, Any]:
    """Sessions with MiniLM into a bank for every dialogue, in turns with encoding the same texts alone."""
    encoder, clock = SentenceEncoder(), _Clock("bank", "encoder")
    pairs = [(dialogue.id, session) for dialogue in read(path).dialogues for session in dialogue.sessions][: cfg.limit]
    encoder.encode_apart([turn_text(turn) for turn in pairs[0][1].turns])
    with TemporaryDirectory() as folder:
        banks = {
            name: _bank(folder, str(place), encoder) for place, name in enumerate(dict.fromkeys(n for n, _ in pairs))
        }
        for number, (name, session) in enumerate(track(pairs, "ingest", len(pairs))):
            texts = [turn_text(turn) for turn in session.turns]
            for what in ("bank", "encoder")[:: 1 - 2 * (number % 2)]:
                if what == "bank":
                    clock.run(what, banks[name].ingest, session)
                else:
                    clock.run(what, encoder.encode_apart, texts)
        for bank in banks.values():
            bank.close()
    return clock.figures()


class _Clock:
    """Seconds of two things that are done in turns, by the clock and of the processor."""

    def __init__(self, one: str, other: str) -> None:
        self.names = one, other
        self.taken: dict[str, list[tuple[float, float]]] = {one: [], other: []}

    def run(self, name: str, what: Callable[..., Any], *given: Any) -> Any:
        began = perf_counter(), process_time()
        result = what(*given)
        self.taken[name].append((perf_counter() - began[0], process_time() - began[1]))
        return result

    def figures(self) -> dict[str, Any]:
        """Medians in ms, and ratios of medians and of sums, of the first to the second."""
        result: dict[str, Any] = {}
        for place, kind in enumerate(("clock", "processor")):
            one, other = ([pair[place] for pair in self.taken[name]] for name in self.names)
            result[kind] = {
                self.names[0]: 1000 * median(one),
                self.names[1]: 1000 * median(other),
                "ratio": median(one) / median(other),
                "ratio_of_sums": sum(one) / sum(other),
            }
        return result


def _ratio(figures: dict[str, Any]) -> str:
    parts = []
    for kind in ("clock", "processor"):
        (_, one), (_, other), (_, ratio), (_, sums) = figures[kind].items()
        parts.append(f"{ratio:.3f} by medians, {sums:.3f} by sums ({one:.1f} and {other:.1f} ms of {kind})")
    return "; ".join(parts)


if __name__ == "__main__":
    from remind.core.cli import main

    main(BenchMemoryConfig, bench_memory, __doc__)
