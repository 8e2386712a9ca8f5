"""What a bank of RMM has learned: the weights of its reranker on disk, in step with the bank's journal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import DataError
from remind.core.files import sha256_file
from remind.memory.reranker import NAME, Episode, Reranker

if TYPE_CHECKING:
    from remind.memory.rmm import RmmBank

_log = logging.getLogger(__name__)


class Weights:
    """The reranker of a bank.

    After every full batch its weights are a file of their own, `reranker-<updates>.safetensors`. It is synced before
    the transaction that names it, which is that of the feedback it was learned from; so a kill at any moment leaves a
    journal and the weights that belong to it. The last two files are kept, and the older one is gone on from where the
    newer is damaged. Episodes of a batch that is not full are made from the journal when it is.

    Args:
        bank: whose journal it is.

    Attributes:
        told: grows with every feedback; the same when the bank is opened again. 0: there was none.
    """

    def __init__(self, bank: RmmBank) -> None:
        self.bank = bank
        self.recall()

    def recall(self) -> None:
        """Read what the journal tells, and remove files that it does not name."""
        journal = self.bank.store.journal()
        self._reranker: Reranker | None = None
        self.told = sum(entry["event"] in ("feedback", "weights") for entry in journal)
        places = [place for place, entry in enumerate(journal) if entry["event"] == "weights"]
        # newest first
        self._files: list[str] = [journal[place]["file"] for place in reversed(places[-2:])]
        self._waiting = [entry for entry in journal[places[-1] + 1 if places else 0 :] if "order" in entry]
        self._sweep()

    def load(self) -> Reranker:
        """The reranker with the weights that the journal names, else those that the bank begins with.

        Raises:
            DataError: files that are damaged, or weights that do not go with the system's settings or the encoder.
        """
        if self._reranker is None:
            self._reranker = self._checked(self._found())
        return self._reranker

    def learn(self, entry: Mapping[str, Any], episode: Callable[[Mapping[str, Any]], Episode]) -> None:
        """Log feedback, and learn from it together with what waits where that makes a batch.

        Args:
            entry: for the journal; with "order" where there is something to learn from.
            episode: makes an episode of such an entry.
        """
        system, store = self.bank.system, self.bank.store
        waiting = [*self._waiting, entry] if "order" in entry else self._waiting
        full = len(waiting) >= system.reranker.batch
        try:
            with store.transaction():
                store.log(entry)
                if full:
                    self.load().learn([episode(one) for one in waiting])
                    name = self.keep()
        except BaseException:
            # what was learned in memory is not what is stored
            self._reranker = None
            raise
        self.told += 1 + full
        self._waiting = [] if full else waiting
        if full:
            self._files = [name, *self._files[:1]]
            self._sweep()
            if system.scope == "shared":
                self.publish()

    def publish(self) -> None:
        """Bring the folder of the common weights up to date."""
        path = Path(str(self.bank.system.weights))
        if not (path / NAME).is_file() or Reranker.load(path).step < self.load().step:
            self.load().save(path)

    def keep(self) -> str:
        """Write the weights beside the bank's store and name the file in its journal, in the transaction under way.
        Nothing is written before the first update. Returns the file's name."""
        reranker, store = self.load(), self.bank.store
        path = store.folder / f"reranker-{reranker.step}.safetensors"
        if reranker.step:
            reranker.write(path)
            store.log({"event": "weights", "file": path.name, "sha256": sha256_file(path)})
        return path.name

    def _found(self) -> Reranker | None:
        """The bank's own weights, or those it is given: at the start, and where others went on with the common ones."""
        own, path = self._own(), self.bank.system.weights
        if path is None or (own is not None and self.bank.system.scope != "shared"):
            return own
        given = Reranker.load(path) if (Path(path) / NAME).is_file() else None
        return max((one for one in (own, given) if one is not None), key=lambda one: one.step, default=None)

    def _own(self) -> Reranker | None:
        problem: DataError | None = None
        for name in self._files:
            try:
                found = Reranker.read(self.bank.folder / name)
            except DataError as error:
                problem = problem or error
                continue
            if problem is not None:
                _log.warning("%s; continuing from %s", problem, name)
            return found
        if problem is not None:
            raise problem
        return None

    def _checked(self, found: Reranker | None) -> Reranker:
        wanted, dimension = self.bank.system.reranker, self.bank.encoder.dimension
        if found is None:
            return Reranker(wanted, dimension)
        have = (found.config.candidates, found.config.scale, found.dimension)
        if have != (wanted.candidates, wanted.scale, dimension):
            needed = f"{wanted.candidates} candidates, scale {wanted.scale:g} and dimension {dimension}"
            message = "the weights are for {} candidates, scale {:g} and dimension {}, not for {}".format(*have, needed)
            raise DataError(message, self.bank.system.weights or self.bank.folder)
        found.config = wanted
        return found

    def _sweep(self) -> None:
        for path in self.bank.folder.glob("reranker-*.safetensors"):
            if path.name not in self._files:
                path.unlink()
