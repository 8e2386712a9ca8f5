"""Runs in which systems learn: in copies of banks and of weights, so that what was killed is made again alike."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from remind.core.errors import DataError
from remind.core.files import atomic_path, sha256_file, write_text
from remind.memory.base import Bank, MemorySystem
from remind.memory.citers import CiterName
from remind.memory.reranker import NAME, Reranker
from remind.memory.rmm import RmmSystem
from remind.models.encoder import SentenceEncoder


class Course:
    """Common weights (`scope: shared`) as a run teaches them, one dialogue after the other.

    The weights after every dialogue are a file in the run's folder; the folder that the system names gets the last ones
    when the run ends. So a dialogue that is asked again begins with the weights it began with before.

    Args:
        system: whose weights they are.
        folder: of the run, for this system. None: the run teaches nothing.
        dimension: of the encoder.

    Raises:
        DataError: weights that cannot be read.
    """

    def __init__(self, system: RmmSystem, folder: Path | None, dimension: int) -> None:
        self.common = Path(str(system.weights))
        self._folder, self._now = folder, None if folder is None else folder / "begin.safetensors"
        if self._now is not None and not self._now.is_file():
            there = (self.common / NAME).is_file()
            (Reranker.load(self.common) if there else Reranker(system.reranker, dimension)).write(self._now)

    @property
    def begins(self) -> str:
        """What names the weights that the next dialogue begins with: their hash, or the common folder."""
        return str(self.common) if self._now is None else sha256_file(self._now)

    def advance(self, key: str) -> None:
        """Go on with the weights after this dialogue; one that has failed has none."""
        if self._folder is not None and self._after(key).is_file():
            self._now = self._after(key)

    @contextmanager
    def lesson(self, key: str, copy: Path) -> Iterator[None]:
        """The weights in the folder `copy`; what they are after the block is kept if it succeeds.

        Args:
            key: of the dialogue with its questions and settings.
        """
        assert self._now is not None
        self._after(key).unlink(missing_ok=True)
        copy.mkdir()
        shutil.copyfile(self._now, copy / NAME)
        yield
        with atomic_path(self._after(key)) as temporary:
            shutil.copyfile(copy / NAME, temporary)

    def publish(self) -> None:
        """Write the last weights into the common folder, once.

        Raises:
            DataError: the common weights are none that this run began with or came by.
        """
        if self._folder is None or self._now is None:
            return
        path, published = self.common / NAME, self._folder / "published"
        if published.is_file() and published.read_text() == self.begins:
            return
        if path.is_file() and sha256_file(path) not in map(sha256_file, self._folder.glob("*.safetensors")):
            raise DataError(f"was trained by another run; the weights of this run are in {self._now}", path)
        Reranker.read(self._now).save(self.common)
        write_text(published, self.begins)

    def _after(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{key[:24]}.safetensors"


def courses(
    systems: Mapping[str, MemorySystem], citer: CiterName, folder: Path, encoder: SentenceEncoder
) -> dict[str, Course]:
    """The courses of a run's systems by name, of those whose weights are shared.

    Args:
        folder: of the run, for what is learned.
    """
    return {
        name: Course(system, None if citer == "none" else folder / name, encoder.dimension)
        for name, system in systems.items()
        if isinstance(system, RmmSystem) and system.scope == "shared"
    }


@contextmanager
def learning(citer: CiterName, bank: Bank, folder: Path, course: Course | None, key: str) -> Iterator[Bank]:
    """A copy of a bank, which is closed, to learn in; gone afterwards. So a run that is killed or made again does not
    begin with what was learned in it. Without a citer, or where nothing is learned, the bank itself.

    Args:
        folder: of the temporary copy.
        course: of weights that are shared.
        key: of the dialogue with its questions and settings.
    """
    if citer == "none" or not bank.learns:
        yield bank
        return
    bank.close()
    system = bank.system
    with TemporaryDirectory(prefix=".asked.", suffix=".tmp", dir=folder) as copies, ExitStack() as held:
        copied, weights = shutil.copytree(bank.folder, Path(copies) / "bank"), Path(copies) / "weights"
        if course is not None and isinstance(system, RmmSystem):
            held.enter_context(course.lesson(key, weights))
            system = replace(system, weights=str(weights))
        with system.open(copied, bank.dialogue_id, bank.services) as opened:
            yield opened
