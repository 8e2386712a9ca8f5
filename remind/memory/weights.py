"""What a bank of RMM has learned: the weights of its reranker, stored with the feedback they were learned from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load, save

from remind.core.errors import DataError
from remind.memory.reranker import NAME, Episode, Reranker

if TYPE_CHECKING:
    from remind.memory.rmm import RmmBank


class Weights:
    """The reranker of a bank.

    After every full batch its weights are stored in the transaction of the feedback that filled it. Episodes of a batch
    that is not full are made from the journal when it is.

    Args:
        bank: whose journal it is.

    Attributes:
        told: grows with every feedback; the same when the bank is opened again. 0: there was none.
    """

    def __init__(self, bank: RmmBank) -> None:
        self.bank = bank
        self.recall()

    def recall(self) -> None:
        """Read what the bank has of feedback and weights."""
        journal = self.bank.store.journal()
        self._reranker: Reranker | None = None
        self.told = sum(entry["event"] in ("feedback", "weights") for entry in journal)
        places = [place for place, entry in enumerate(journal) if entry["event"] == "weights"]
        self._waiting = [entry for entry in journal[places[-1] + 1 if places else 0 :] if "order" in entry]

    def load(self) -> Reranker:
        """The reranker with the weights that are stored, else those that the bank begins with.

        Raises:
            DataError: weights that cannot be read, or do not go with the system's settings or the encoder.
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
                    self.keep()
        except BaseException:
            # what was learned in memory is not what is stored
            self._reranker = None
            raise
        self.told += 1 + full
        self._waiting = [] if full else waiting
        if full and system.scope == "shared":
            self.publish()

    def publish(self) -> None:
        """Bring the folder of the common weights up to date."""
        path = Path(str(self.bank.system.weights))
        if not (path / NAME).is_file() or Reranker.load(path).step < self.load().step:
            self.load().save(path)

    def keep(self) -> None:
        """Store the weights in the transaction under way; before the first update there is nothing to store."""
        one, store = self.load(), self.bank.store
        if one.step:
            ema = np.array(np.nan if one.ema is None else one.ema)
            store.learn(NAME, save({"w_q": one.w_q, "w_m": one.w_m, "ema": ema, "step": np.array(one.step)}))
            store.log({"event": "weights"})

    def _found(self) -> Reranker | None:
        """The bank's own weights, or those it is given: at the start, and where others went on with the common ones."""
        own, path = self._own(), self.bank.system.weights
        if path is None or (own is not None and self.bank.system.scope != "shared"):
            return own
        given = Reranker.load(path) if (Path(path) / NAME).is_file() else None
        return max((one for one in (own, given) if one is not None), key=lambda one: one.step, default=None)

    def _own(self) -> Reranker | None:
        if (stored := self.bank.store.learned(NAME)) is None:
            return None
        held = load(stored)
        own = Reranker(self.bank.system.reranker, self.bank.encoder.dimension)
        own.w_q, own.w_m, own.step = held["w_q"], held["w_m"], int(held["step"])
        own.ema = None if np.isnan(held["ema"]) else float(held["ema"])
        return own

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
