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
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, ClassVar

from remind.core.errors import ConfigError, RemindError
from remind.data.dialogue import Session, Turn
from remind.memory.bank import Bank
from remind.memory.base import System
from remind.states.pyramid import one_line
from sae.ranges import PositiveInt

#: What packages are told for an address, a key and a model: the meter reads none of them.
URL, NO_KEY, MODEL = "http://meter/v1", "none", "none"


@dataclass(frozen=True)
class PackageSystem(System):
    """Base of the systems whose memories a package writes, from batches of turns."""

    provenance = "batch"
    batch: PositiveInt = 2
    """Turns that the package is given together; Mem0's authors have 2 in their evaluation on LoCoMo."""

    def described(self, package: str, prompt: str) -> dict[str, Any]:
        """As `System.about`, with the version of the package and the hash of its prompt."""
        made_of = {"extract": hashlib.sha256(prompt.encode()).hexdigest()[:12]}
        return {**super().about(), "package": f"{package} {metadata.version(package)}", "prompt_hashes": made_of}


class PackageBank(Bank):
    """A bank whose memories a package writes. They are found as the package finds them, by cosine."""

    system: PackageSystem
    #: Name of the logger of what logs errors in place of raising them.
    logger: ClassVar[str]

    @abstractmethod
    def load(self) -> Any:
        """The package with all memories of the store."""

    @abstractmethod
    def take_in(self, package: Any, session: Session, turns: Sequence[Turn]) -> None:
        """Give the package turns of the session and put what changed into the store."""

    def remember(self, session: Session) -> None:
        package, batch, logger = self.load(), self.system.batch, logging.getLogger(self.logger)
        for start in range(0, len(session.turns), batch):
            self._lost = _Lost(logging.ERROR)
            logger.addHandler(self._lost)
            self.asked += 1
            try:
                self.take_in(package, session, session.turns[start : start + batch])
            except (RemindError, sqlite3.Error, OSError):
                # the bank cannot be written
                raise
            except Exception as error:
                # whatever a package raises: the batch is lost, and the session says so
                self._lost.lines = [f"{type(error).__name__}: {error}"]
            finally:
                logger.removeHandler(self._lost)
            # some packages put a whole reply into an error
            self.lost += (f"extract: {one_line(line)[:400]}" for line in self._lost.lines)

    def is_user(self, turn: Turn) -> bool:
        """Whether the speaker of the dialogue's first turn said it, whom packages take for their user."""
        return turn.speaker == self.store.sessions()[0].turns[0].speaker

    def client(self) -> Any:
        """The run's endpoint as a package's HTTP client; it notes errors, which some packages pass over.

        Raises:
            ConfigError: the run names none.
        """
        if self.services.client is None:
            raise ConfigError(f"{self.system.name} needs a chat model; name one: --llm.default.base_url URL")
        client = self.services.client(self.system.name, self.dialogue_id, "extract")

        def note(response: Any) -> None:
            if response.status_code >= 400:
                self._lost.lines.append(f"HTTP {response.status_code}: {response.read().decode(errors='replace')}")

        client.event_hooks = {"response": [note]}
        return client


class _Lost(logging.Handler):
    """What was lost of a batch, a line each; errors that are logged are."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
