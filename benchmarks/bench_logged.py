"""What banks of operations take where no model is asked: seconds and memory of ingesting many sessions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from torch import Tensor

from benchmarks.measure import about, headline, resident
from remind.core.files import write_json
from remind.core.processes import spawned_pool
from remind.data.dialogue import Session, Turn
from remind.memory.base import Services
from remind.memory.systems import make_system
from remind.models.encoder import SentenceEncoder

_WORDS = (
    "apple bakery boat book bridge camera candle carpet castle chair cheese church cinema coat coffee concert cousin "
    "desk doctor dress engine farm field flower forest garden gift guitar hammer harbour hat horse hotel island "
    "jacket kitchen ladder lake lamp library market mirror mountain museum neighbour office orchard painter palace "
    "parcel pencil piano pillow planet pocket poem radio river roof school shelf shirt soup station stone summer "
    "table teacher theatre ticket tiger tower train tunnel uncle valley village violin wagon wallet window winter yard"
)
_NAMES = ("Ana", "Ben")
_SAID = (
    "I went to the {} with {} last {} and we saw a {} there.",
    "My {} is {} now, and the {} is next to the {}.",
    "I love {} more than {}, but {} is fine with a {}.",
    "Every morning I take the {} first, then the {}, then a {} and the {}.",
    "Do you know the {}?",
    "Ha, that is so funny!",
    "Thanks, see you later!",
    "What about you?",
)


@dataclass
class BenchLoggedConfig:
    """Ingest made-up sessions, half of them small talk, into a bank of each system, with MiniLM."""

    sessions: int = 1000
    """Sessions of a bank, a day apart."""
    turns: int = 8
    """Turns of a session."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""


class Timed(SentenceEncoder):
    """Adds up what encoding takes, in seconds of processors."""

    taken = 0.0

    def encode_apart(self, texts: Sequence[str]) -> Tensor:
        began = process_time()
        vectors = super().encode_apart(texts)
        self.taken += process_time() - began
        return vectors


def made_up(cfg: BenchLoggedConfig, seed: int = 0) -> Iterator[Session]:
    """The sessions in order."""
    draw, words = random.Random(seed), _WORDS.split()
    for number in range(cfg.sessions):
        turns = []
        for place in range(cfg.turns):
            said = draw.choice(_SAID).format(*draw.choices(words, k=4))
            turns.append(Turn(f"S{number}:{place}", _NAMES[place % 2], said))
        day = f"{2000 + number // 336}-{number // 28 % 12 + 1:02}-{number % 28 + 1:02}"
        yield Session(f"S{number}", day, tuple(turns))


def measured(system: str, cfg: BenchLoggedConfig) -> dict[str, float]:
    """Seconds by the clock and of processors, and resident memory in MB after a tenth of the sessions and at last."""
    encoder = Timed()
    encoder.encode_apart(["warm"])
    encoder.taken = 0.0
    with TemporaryDirectory() as folder:
        bank = make_system(system, {"policy": "extractive"}).open(Path(folder) / "bank", "d", Services(encoder))
        began = perf_counter(), process_time()
        tenth = 0.0
        with bank:
            for number, session in enumerate(made_up(cfg)):
                bank.ingest(session)
                if number == cfg.sessions // 10:
                    tenth = resident("VmRSS")
            taken = perf_counter() - began[0], process_time() - began[1]
            last, report = resident("VmRSS"), bank.report()
    return {
        "seconds": taken[0],
        "processor": taken[1],
        "encoding": encoder.taken,
        "mb_at_a_tenth": tenth / 2**20,
        "mb": last / 2**20,
        "operations": report["journal"],
        "rejected": report["rejected"],
    }


def bench_logged(cfg: BenchLoggedConfig) -> dict[str, Any]:
    """Run, print and return the figures by system."""
    print(headline(about("torch", "numpy")))
    figures = {}
    for system in ("membuilder", "salimory"):
        with spawned_pool(1) as pool:
            one = figures[system] = pool.submit(measured, system, cfg).result()
        print(
            f"{system}: {cfg.sessions} sessions in {one['seconds']:.1f} s; {one['processor']:.1f} s of processors, "
            f"{one['encoding']:.1f} s of these for encoding; {one['mb_at_a_tenth']:.0f} MB after a tenth of them and "
            f"{one['mb']:.0f} MB at last; {one['operations']} operations, {one['rejected']} rejected"
        )
    if cfg.out is not None:
        write_json(cfg.out, figures)
    return figures


if __name__ == "__main__":
    from remind.core.cli import main

    main(BenchLoggedConfig, bench_logged, __doc__)
