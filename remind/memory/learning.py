"""Runs in which systems learn: in copies of banks, so that what was killed is made again alike."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from remind.core.files import atomic_path
from remind.memory.bank import Bank
from remind.memory.reranker import NAME
from remind.memory.rmm import RmmBank


@contextmanager
def learning(bank: Bank, folder: Path, weights: str | None, after: Path) -> Iterator[Bank]:
    """A copy of a bank, which is closed, to learn in; gone afterwards. So a run that is killed or made again does not
    begin with what was learned in it. Where nothing is learned, the bank itself.

    Args:
        folder: of the temporary copy.
        weights: folder of those that the copy begins with.
        after: folder that those after the block are kept in if it succeeds, where dialogues share them.
    """
    if not bank.learns:
        yield bank
        return
    bank.close()
    system = replace(bank.system, weights=weights)  # type: ignore[call-arg]
    with TemporaryDirectory(prefix=".asked.", suffix=".tmp", dir=folder) as copies:
        copied = shutil.copytree(bank.folder, Path(copies) / "bank")
        with system.open(copied, bank.dialogue_id, bank.services) as opened:
            yield opened
            if isinstance(opened, RmmBank) and opened.system.scope == "shared":
                keep(opened.reranker.dump(), after)


def keep(weights: bytes, folder: Path) -> None:
    """Write weights into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / NAME) as temporary:
        temporary.write_bytes(weights)
