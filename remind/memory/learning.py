"""Runs in which systems learn: in copies of banks and of weights, so that what was killed is made again alike."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from remind.core.errors import DataError
from remind.core.files import atomic_path, sha256_file
from remind.memory.bank import Bank
from remind.memory.reranker import NAME, Reranker
from remind.memory.rmm import RmmSystem


class Course:
    """Common weights (`scope: shared`) as a run teaches them, one dialogue after the other.

    The weights after every dialogue are a file in the run's folder; the folder that the system names gets the last ones
    when the run ends. So a dialogue that is asked again begins with the weights it began with before.

    Args:
        system: whose weights they are.
        folder: of the run, for this system.
        dimension: of the encoder.

    Raises:
        DataError: weights that cannot be read.
    """

    def __init__(self, system: RmmSystem, folder: Path, dimension: int) -> None:
        self.common, self._folder, self.now = Path(str(system.weights)) / NAME, folder, folder / "begin.safetensors"
        if not self.now.is_file():
            there = self.common.is_file()
            (Reranker.load(self.common) if there else Reranker(system.reranker, dimension)).save(self.now)

    def after(self, key: str) -> Path:
        """The weights after a dialogue, by the key of dialogue, questions and settings."""
        return self._folder / f"{key[:24]}.safetensors"

    def advance(self, key: str) -> None:
        """Go on with the weights after this dialogue; one that has failed has none."""
        if self.after(key).is_file():
            self.now = self.after(key)

    def publish(self) -> None:
        """Write the last weights where the system has them.

        Raises:
            DataError: the common weights are none that this run began with or came by.
        """
        known = map(sha256_file, self._folder.glob("*.safetensors"))
        if self.common.is_file() and sha256_file(self.common) not in known:
            raise DataError(f"was trained by another run; the weights of this run are in {self.now}", self.common)
        Reranker.load(self.now).save(self.common)


@contextmanager
def learning(bank: Bank, folder: Path, course: Course | None, key: str) -> Iterator[Bank]:
    """A copy of a bank, which is closed, to learn in; gone afterwards. So a run that is killed or made again does not
    begin with what was learned in it. Where nothing is learned, the bank itself.

    Args:
        folder: of the temporary copy.
        course: of weights that are shared; those after the block are kept if it succeeds.
        key: of the dialogue with its questions and settings.
    """
    if not bank.learns:
        yield bank
        return
    bank.close()
    system = bank.system
    with TemporaryDirectory(prefix=".asked.", suffix=".tmp", dir=folder) as copies:
        copied, weights = shutil.copytree(bank.folder, Path(copies) / "bank"), Path(copies) / "weights"
        if course is not None:
            course.after(key).unlink(missing_ok=True)
            weights.mkdir()
            shutil.copyfile(course.now, weights / NAME)
            system = replace(system, weights=str(weights))  # type: ignore[call-arg]
        with system.open(copied, bank.dialogue_id, bank.services) as opened:
            yield opened
        if course is not None:
            with atomic_path(course.after(key)) as temporary:
                shutil.copyfile(weights / NAME, temporary)
