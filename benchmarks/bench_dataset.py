"""What a states dataset takes by its size: writing it dialogue by dialogue, opening it, reading every question."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from benchmarks.measure import about, headline
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.states.dataset import finish, load_states, read_manifest, write_part
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of


@dataclass
class BenchDatasetConfig:
    """Made-up questions about made-up dialogues; every step is a process of its own."""

    questions: tuple[int, ...] = (2000, 20279)
    """Questions of each dataset: 20,279 are the test questions of RefMem-Bench."""
    per_dialogue: int = 20
    """Questions about each dialogue."""
    words: int = 5700
    """Words that x0 shows of a dialogue; 5,700 are about 7,600 tokens."""


def bench_dataset(cfg: BenchDatasetConfig) -> None:
    """Run and print, a row for each size."""
    print(headline(about("datasets", "pyarrow")))
    print(
        f"{'questions':>10}{'MB':>8}{'write s':>9}{'MB peak':>9}{'open s':>8}{'MB peak':>9}{'read s':>8}{'MB peak':>9}"
    )
    for count in cfg.questions:
        with TemporaryDirectory() as folder:
            steps = [_step(name, folder, count, cfg) for name in ("write", "load", "read")]
            size = sum(file.stat().st_size for file in (Path(folder) / "states").glob("*")) / 2**20
        row = f"{count:>10,}{size:>8,.0f}"
        print(
            row + "".join(f"{seconds:>{9 if n == 0 else 8}.1f}{peak:>9,.0f}" for n, (seconds, peak) in enumerate(steps))
        )


def _step(name: str, folder: str, count: int, cfg: BenchDatasetConfig) -> tuple[float, float]:
    """Seconds and the most resident memory, in MB, of a step."""
    words = [sys.executable, "-m", "benchmarks.bench_dataset", name, folder, str(count)]
    words += [str(cfg.per_dialogue), str(cfg.words)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return float(said[-2]), float(said[-1])


def step(name: str, folder: Path, count: int, per_dialogue: int, words: int) -> None:
    """One step, in a process of its own; prints seconds and peak."""
    began = perf_counter()
    if name == "write":
        draw = random.Random(0)
        known = [f"{draw.choice('bcdfghlmnprst')}{draw.choice('aeiou')}{number % 997}" for number in range(5000)]
        (folder / "states").mkdir()
        for first in range(0, count, per_dialogue):
            turns = tuple(
                Turn(f"t{n}", "Ana" if n % 2 else "Ben", " ".join(draw.choices(known, k=20)))
                for n in range(words // 20)
            )
            dialogue = Dialogue(f"d{first:06d}", (Session("s", None, turns),))
            base = FactualState(
                dialogue, Question("", dialogue.id, "?"), (Segment(0, len(turns) - 1),), Strategy(("x",))
            )
            records = []
            for number in range(first, min(count, first + per_dialogue)):
                question = Question(f"q{number}", dialogue.id, "Why?", answers=("so",), evidence=("t1",))
                marked = AttentionalState(replace(base, question=question), ((1, 3),), (0.5,) * len(turns))
                records.append(record_of(ReflectiveState(marked, "because"), "test"))
            write_part(folder / "states", records)
        finish(folder / "states", {})
    elif name == "load":
        load_states(folder / "states")
    else:
        read_manifest(folder / "states")
        assert sum(len(row["x2"]["text"]) > 0 for row in load_states(folder / "states")["test"]) == count
    print(perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


if __name__ == "__main__":
    if len(sys.argv) == 6:
        step(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
    else:
        from remind.core.cli import main

        main(BenchDatasetConfig, bench_dataset, __doc__)
