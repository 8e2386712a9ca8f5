"""A corpus small enough to be built many times."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path

from remind.cli import main
from remind.pipeline import BuildStatesConfig, build_states

TALK = (
    ("Ana", "I gave up coffee after the new year, it kept me awake."),
    ("Ben", "Then what do you drink at work?"),
    ("Ana", "Mostly tea, and water from the garden well."),
    ("Ben", "My sister sold her violin to pay for the boat."),
    ("Ana", "Did she tell you where she sails to?"),
    ("Ben", "Only that the harbour is north of here."),
)


def rows(dialogues: int, first: int = 0) -> list[dict[str, object]]:
    """Lines of a RefMem-Bench file: dialogues of six turns with two questions each."""
    found: list[dict[str, object]] = []
    for number in range(first, first + dialogues):
        turns = [
            {"id": f"t{n}", "speaker": speaker, "text": f"{text} ({number})", "images": []}
            for n, (speaker, text) in enumerate(TALK)
        ]
        found.append({"type": "context", "id": f"c{number}", "sessions": [{"id": "s", "time": None, "turns": turns}]})
        common = {"type": "question", "context_id": f"c{number}", "images": []}
        found.append(
            {**common, "id": f"q{number}a", "question": f"What does Ana drink now, {number}?", "format": "direct",
             "options": [], "answers": ["tea"], "evidence": ["t2"]}
        )  # fmt: skip
        found.append(
            {**common, "id": f"q{number}b", "question": "What did Ben's sister sell?", "format": "single",
             "options": ["a boat", "a violin"], "answers": ["B"], "evidence": ["t3"]}
        )  # fmt: skip
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


class Building:
    """`build_states.py` in a process of its own, forked from one that has imported what it needs."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["small_corpus", "sentence_transformers", "transformers.models.bert"])
        folder.mkdir(exist_ok=True)
        self._said = [folder / f"{len(list(folder.iterdir()))}.{name}" for name in ("out", "err")]
        self._process = context.Process(target=_build, args=(arguments, *self._said))
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        """It and whatever it has started."""
        os.killpg(self.pid, signal.SIGKILL) if os.getpgid(self.pid) == self.pid else self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for its end; what it said on standard output and standard error."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it goes on"
        return self._said[0].read_text(), self._said[1].read_text()


def _build(arguments: list[str], out: Path, errors: Path) -> None:
    os.setsid()
    for number, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    main(BuildStatesConfig, build_states, "", arguments)
