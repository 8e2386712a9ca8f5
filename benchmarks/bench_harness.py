"""What an evaluation costs besides its models: seconds per question, the time to the first answer, memory, and a second
run over known answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import about, headline, resident
from remind.core.errors import ConfigError, DataError
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.evaluation.answerers import FixedAnswers, OnOutput
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.run import run_evaluation
from remind.models.chat import Content
from remind.models.encoder import SentenceEncoder
from remind.models.generate import Generation
from remind.states.dataset import finish, write_part
from remind.states.pyramid import AttentionalState, FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import StateRecord, record_of
from sae.ranges import PositiveInt, check_ranges


@dataclass
class HarnessBenchConfig:
    """Time an evaluation whose model answers at once."""

    questions: PositiveInt = 1000
    """How many questions."""
    turns: PositiveInt = 160
    """Turns that x0 shows; 160 of 30 words are about 7,200 tokens."""
    words: PositiveInt = 30
    """Words of each turn."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


class Instant(FixedAnswers):
    """A well-formed output that cites one of ten lines, so that little is left to encode; counts what is asked.

    Attributes:
        first: when the first question came.
        held: bytes of the process that no file is behind, at each call.
    """

    def __init__(self) -> None:
        super().__init__("none", Generation("<answer>A</answer>", 0, finished=True))
        self.asked, self.first, self.held = 0, 0.0, list[int]()

    def answer(self, prompts: Sequence[Content], ids: Sequence[str], done: Sequence[bool], on_output: OnOutput) -> None:
        self.first = self.first or time.perf_counter()
        self.held.append(resident("RssAnon"))
        for n in (n for n, skip in enumerate(done) if not skip):
            text = f"<answer>A</answer><explanation>Ana: remark {self.asked % 10}</explanation>"
            self.asked += 1
            on_output(n, Generation(text, 0, finished=True))


def bench(cfg: HarnessBenchConfig) -> dict[str, Any]:
    """Run and run again; prints seconds, and milliseconds per question."""
    answerer = Instant()
    rows: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="remind-bench-") as folder:
        states = _states(cfg, Path(folder) / "states")
        run = EvaluateConfig(states=str(states), model="instant", out=str(Path(folder) / "out"))
        SentenceEncoder().encode(["a first forward costs more than the others"])
        started = time.perf_counter()
        rows["first run"] = _timed(lambda: run_evaluation(run, answerer=answerer))
        rows["again, all known"] = _timed(lambda: run_evaluation(run, answerer=answerer))
        if answerer.asked != cfg.questions:
            raise DataError(f"{answerer.asked} questions were asked, not {cfg.questions}: some twice")
    machine = about("torch", "transformers", "sentence-transformers", "remind-toolkit")
    found: dict[str, Any] = {
        "questions": cfg.questions,
        "about": machine,
        "seconds": rows,
        "first_answer_seconds": answerer.first - started,
        "held_mb": [answerer.held[0] / 1e6, max(answerer.held) / 1e6],
    }
    print(f"{cfg.questions} questions, {cfg.turns} turns of {cfg.words} words each; {headline(machine)}")
    print(f"{'':<20}{'wall s':>9}{'cpu s':>9}{'ms per question':>18}")
    for name, row in rows.items():
        print(f"{name:<20}{row['wall']:>9.2f}{row['cpu']:>9.2f}{1000 * row['wall'] / cfg.questions:>18.2f}")
    first, most = found["held_mb"]
    print(f"first answer after {answerer.first - started:.1f} s; memory {first:.0f} MB there, {most:.0f} MB at most")
    return found


def _timed(run: Callable[[], dict[str, Any]]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


def _states(cfg: HarnessBenchConfig, folder: Path) -> Path:
    """States of dialogues with ten questions each, by turns of the three formats."""
    folder.mkdir()
    for number, start in enumerate(range(0, cfg.questions, 10)):
        turns = tuple(
            Turn(f"t{n}", "Ana" if n % 2 else "Bo", " ".join(f"w{(n * 31 + k * 7) % 997}" for k in range(cfg.words)))
            for n in range(cfg.turns)
        )
        dialogue = Dialogue(f"d{number}", (Session("s", "1 May", turns),))
        write_part(folder, [_record(dialogue, n, cfg) for n in range(start, min(start + 10, cfg.questions))])
    finish(folder, {"inputs": {}, "llm": "none"})
    return folder


def _record(dialogue: Dialogue, number: int, cfg: HarnessBenchConfig) -> StateRecord:
    format = ("single", "multi", "direct")[number % 3]
    question = Question(
        f"q{number}",
        dialogue.id,
        f"what about w{number % 997}?",
        format=format,  # type: ignore[arg-type]
        options=() if format == "direct" else ("red", "green", "blue", "grey"),
        answers=("A",),
        evidence=(f"t{number % cfg.turns}",),
        dimension="belief_modeling" if number % 2 else None,
        category=None if number % 2 else 4,
    )
    factual = FactualState(dialogue, question, (Segment(0, cfg.turns - 1),), Strategy(("Think.",), ("Ana",)))
    return record_of(ReflectiveState(AttentionalState(factual, ((0, 0),)), "because"), "test")


if __name__ == "__main__":
    from remind.core.cli import main

    main(
        HarnessBenchConfig,
        bench,
        "Seconds an evaluation takes around the model: per question, and for a run whose answers are all known.",
    )
