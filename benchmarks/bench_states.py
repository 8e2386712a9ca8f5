"""What building states takes: time and memory by the number of dialogues, a second run."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from benchmarks.measure import renumbered, resident
from remind.core.errors import ConfigError, ModelError
from remind.core.files import read_json, write_json
from remind.data.dialogue import Corpus, Dialogue, Question
from remind.data.readers import read, write_refmem

#: Stages that a dialogue takes once, whatever is asked of it.
_ONCE = ("segments", "cues", "codes")
#: Seconds between looks at the memory of a build; each process says itself what the most was.
_LOOK = 0.2


@dataclass
class BenchStatesConfig:
    """Build pieces of real dialogues, perturbed, in growing numbers; every build is a process of its own."""

    input: str | list[str]
    """Dialogues with questions and gold evidence, to cut the pieces from."""
    sae: str
    """Folder of trained SAEs."""
    dialogues: tuple[int, ...] = (10, 100, 1000)
    """How many pieces each build has."""
    sessions: int = 2
    """Sessions of a piece; it keeps the questions whose evidence lies in them."""
    questions: int = 4
    """At most this many questions a piece."""
    workers: int = 2
    """Processes of each build."""
    out: str | None = None
    """JSON file for the figures; None: they are only printed."""
    given: list[str] = field(default_factory=list)
    """Further arguments of remind build-states."""


def bench_states(cfg: BenchStatesConfig) -> list[dict[str, Any]]:
    """Run, print and return the figures, a row for each number of dialogues.

    Raises:
        ConfigError: an input without questions that can be cut out. ModelError: a build that failed.
    """
    paths = [cfg.input] if isinstance(cfg.input, str) else list(cfg.input)
    pieces = [piece for path in paths for piece in cut(read(path), cfg.sessions, cfg.questions)]
    if not pieces:
        raise ConfigError(f"{', '.join(paths)}: no question has all of its evidence in {cfg.sessions} sessions")
    # every build has the longest, which takes the most memory
    longest = max(pieces, key=_length)
    pieces = [longest, *(piece for piece in pieces if piece is not longest)]
    print(f"{len(pieces)} pieces of {cfg.sessions} sessions; {cfg.workers} processes; torch {version('torch')}")
    rows = []
    for count in cfg.dialogues:
        with TemporaryDirectory() as folder:
            rows.append(_measure(cfg, pieces, count, Path(folder)))
        _print(rows[-1])
    if cfg.out is not None:
        write_json(cfg.out, rows)
    return rows


def cut(corpus: Corpus, sessions: int, questions: int) -> list[Corpus]:
    """Runs of whole sessions as dialogues of their own, with the questions whose gold evidence lies inside."""
    found = []
    for dialogue, asked in corpus.by_dialogue():
        for first in range(0, len(dialogue.sessions), sessions):
            kept = dialogue.sessions[first : first + sessions]
            held = {turn.id for session in kept for turn in session.turns}
            inside = [q for q in asked if q.evidence and held.issuperset(q.evidence)][:questions]
            if inside:
                name = f"{dialogue.id}:{first}"
                own = [replace(q, id=f"{q.id}:{first}", dialogue_id=name, images=()) for q in inside]
                found.append(Corpus((Dialogue(name, renumbered(kept)),), tuple(own)))
    return found


def _length(piece: Corpus) -> int:
    return sum(len(turn.text) for turn in piece.dialogues[0].turns)


def perturbed(pieces: Sequence[Corpus], count: int, seed: int = 0) -> Iterator[Corpus]:
    """So many dialogues: the pieces in turn, from the second round on with words left out, each with ids of its own."""
    draw = random.Random(seed)
    for number in range(count):
        piece = pieces[number % len(pieces)]
        dialogue, name = piece.dialogues[0], f"{number:05d}:{piece.dialogues[0].id}"
        share = 0.1 if number >= len(pieces) else 0.0
        sessions = tuple(
            replace(session, turns=tuple(replace(turn, text=_thin(turn.text, share, draw)) for turn in session.turns))
            for session in dialogue.sessions
        )
        questions: list[Question] = [replace(q, id=f"{number:05d}:{q.id}", dialogue_id=name) for q in piece.questions]
        yield Corpus((Dialogue(name, sessions),), tuple(questions))


def _thin(text: str, share: float, draw: random.Random) -> str:
    words = text.split(" ")
    return " ".join(word for n, word in enumerate(words) if n == 0 or draw.random() >= share)


def _measure(cfg: BenchStatesConfig, pieces: Sequence[Corpus], count: int, folder: Path) -> dict[str, Any]:
    path, cache = folder / "talk", folder / "cache"
    for number, corpus in enumerate(perturbed(pieces, count)):
        write_refmem(corpus, path / f"{number:05d}.jsonl")
    first = _build(cfg, path, folder / "a", cache)
    counts = read_json(folder / "a" / "manifest.json")["counts"]
    again = _build(cfg, path, folder / "b", cache)
    unchanged = _build(cfg, path, folder / "a", cache)
    return {
        "dialogues": counts["dialogues"],
        "questions": counts["questions"],
        "input_mb": _megabytes(path),
        "cache_mb": _megabytes(cache),
        "first": first,
        "from_cache": again,
        "unchanged": unchanged,
    }


def _megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


def _build(cfg: BenchStatesConfig, path: Path, out: Path, cache: Path) -> dict[str, float]:
    """Seconds and the largest resident memory of any of its processes, in MB."""
    command = [sys.executable, "-m", "remind", "build-states", "--input", str(path), "--out", str(out)]
    command += ["--cache", str(cache), "--sae", cfg.sae, "--workers", str(cfg.workers), *cfg.given]
    began, peak = perf_counter(), 0.0
    with (out.parent / "said").open("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            while process.poll() is None:
                peak = max(peak, peak_of_session(process.pid))
                sleep(_LOOK)
        finally:
            # a session of its own does not hear Ctrl-C
            process.kill()
        said.seek(0)
        if process.returncode:
            raise ModelError(f"remind build-states failed: {said.read()[-500:]}")
    return {"seconds": perf_counter() - began, "peak_mb": peak}


def peak_of_session(session: int) -> float:
    """Largest resident memory, in MB, that any process of a session has had so far; 0 where there is no /proc."""
    peak = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # what follows the name in brackets: state, parent, group, session
            if int((folder / "stat").read_text().rpartition(")")[2].split()[3]) != session:
                continue
            peak = max(peak, resident("VmHWM", folder.name))
        except (OSError, ValueError, IndexError):  # it has ended
            continue
    return peak / 2**20


def _print(row: dict[str, Any]) -> None:
    first = row["first"]
    print(
        f"\n{row['dialogues']} dialogues, {row['questions']} questions, {row['input_mb']:.1f} MB: "
        f"{first['seconds']:.0f} s, peak {first['peak_mb']:.0f} MB a process, cache {row['cache_mb']:.0f} MB"
    )
    for name in ("from_cache", "unchanged"):
        figures = row[name]
        ratio = first["seconds"] / figures["seconds"]
        print(f"{name.replace('_', ' ')}: {figures['seconds']:.1f} s, {ratio:.1f} times as fast")


if __name__ == "__main__":
    from remind.core.cli import main

    main(BenchStatesConfig, bench_states, __doc__)
