"""Memory systems that are packages of others, behind the interface of `Bank`.

What such a package holds is made anew from the bank's own store for each session, and what the session changed is put
back into the store inside its transaction. So a session is remembered whole or not at all, a killed process leaves
nothing half-written, and no file of the package's own formats, some of which are pickles, is ever read.
"""

from __future__ import annotations

import hashlib
import logging
import sqlite3
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import ModelError, RemindError
from remind.data.dialogue import Session, Turn
from remind.memory.asking import Written, needs_endpoint
from remind.memory.base import Bank, MemorySystem, Query, Services
from remind.memory.store import Store
from remind.states.pyramid import one_line
from sae.ranges import PositiveInt

if TYPE_CHECKING:
    from remind.llm.request import Stage

#: What packages are told for a key and a model: the gateway reads neither.
NO_KEY = MODEL = "none"
#: Characters of a line on what was lost: some packages put a whole reply into an error.
_LONGEST = 400


@dataclass(frozen=True)
class PackageSystem(Written):
    """Base of the systems whose memories a package writes, from batches of turns."""

    templates = ()
    provenance = "batch"
    batch: PositiveInt = 2
    """Turns that the package is given together; Mem0's authors have 2 in their evaluation on LoCoMo."""

    def described(self, package: str, prompt: str) -> dict[str, Any]:
        """As `MemorySystem.about`, with the version of the package and the hash of its prompt."""
        made_of = {"extract": hashlib.sha256(prompt.encode()).hexdigest()[:12]}
        return {**super().about(), "package": f"{package} {metadata.version(package)}", "prompt_hashes": made_of}


class PackageBank(Bank):
    """A bank whose memories a package writes and finds.

    The package works on what `load` makes; `take_in` gives it a batch of turns, and brings the store up to date.
    """

    system: PackageSystem
    #: Name of the package's logger.
    logger = ""
    _reading: tuple[Store, int, Any] | None = None

    def __init__(self, folder: str | Path, dialogue_id: str, system: MemorySystem, services: Services) -> None:
        super().__init__(folder, dialogue_id, system, services)
        # what the endpoint refused or failed to do, in the batch at hand: some packages pass over that in silence
        self._refused: list[str] = []

    @abstractmethod
    def load(self, stage: Stage) -> Any:
        """The package with all memories of the store, its requests counted under the stage."""

    @abstractmethod
    def take_in(self, package: Any, session: Session, turns: Sequence[Turn]) -> Iterable[str]:
        """Give the package turns of the session and put what changed into the store.

        Returns:
            What was lost, a line each.
        """

    @abstractmethod
    def search(self, package: Any, text: str, top: int) -> Iterable[tuple[int, float]]:
        """Numbers and scores of at most `top` memories, best first."""

    def remember(self, session: Session) -> Iterable[str]:
        package, batch = self.load("extract"), self.system.batch
        for start in range(0, len(session.turns), batch):
            self._refused.clear()
            with complaints(self.logger) as lines:
                try:
                    lines += self.take_in(package, session, session.turns[start : start + batch])
                    lines += self._refused[:1]
                except (RemindError, sqlite3.Error, OSError):
                    # the bank cannot be written
                    raise
                except Exception as error:
                    # whatever a package raises: the batch is lost, and the session says so
                    lines[:] = [f"{type(error).__name__}: {error}"]
            yield from (f"extract: {one_line(line)[:_LONGEST]}" for line in lines)
        self.keep(package)

    def keep(self, package: Any) -> None:
        """Put what the package needs for the next session, beside memories, into the store."""
        return

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float]]:
        count = self.store.count()
        if not count:
            return
        if self._reading is None or self._reading[:2] != (self.store, self.store.version):
            self._reading = (self.store, self.store.version, self.load("read"))
        given = 0
        # the rest only where some of the first k do not fit
        for top in dict.fromkeys((min(k or count, count), count)):
            for found in self._found(self._reading[2], query.text, top)[given:]:
                given += 1
                yield found

    def said_first(self) -> str:
        """The speaker of the dialogue's first turn, whom packages take for their user."""
        return next(self.store.sessions()).turns[0].speaker

    def url(self, stage: Stage) -> str:
        """The run's endpoint for a client of the package's own. Raises ConfigError where the run names none."""
        if self.services.url is None:
            raise needs_endpoint(self.system.name, stage)
        return self.services.url(self.system.name, self.dialogue_id, stage)

    def client(self, stage: Stage) -> Any:
        """A client of the package openai for that endpoint, without key; retries are made behind it.

        Raises:
            ConfigError: as `url`.
        """
        import openai

        return openai.OpenAI(api_key=NO_KEY, base_url=self.url(stage), max_retries=0, http_client=self.direct())

    def direct(self) -> Any:
        """An HTTP client that asks no proxy of the environment for an address on this machine, and takes note of what
        is answered with an error."""
        import openai

        return openai.DefaultHttpxClient(trust_env=False, event_hooks={"response": [self._note]})

    def _found(self, package: Any, text: str, top: int) -> list[tuple[int, float]]:
        try:
            return list(self.search(package, text, top))
        except RemindError:
            raise
        except Exception as error:
            what = f"{self.system.name} cannot be asked: {type(error).__name__}: {error}"
            raise ModelError(one_line(what)) from None

    def _note(self, response: Any) -> None:
        if response.status_code >= 400:
            self._refused.append(f"HTTP {response.status_code}: {response.read().decode(errors='replace')[:300]}")


@contextmanager
def complaints(logger: str) -> Iterator[list[str]]:
    """What a package logs as errors within the block, in place of raising."""
    lines: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(logger).removeHandler(handler)
