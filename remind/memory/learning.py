"""How systems learn in a run: in copies of banks, so that what was killed is made again alike, and from who says what
an answer cites: its reader, or in its place gold evidence, with or without noise, or words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np

from remind.core.files import atomic_path, sha256_json
from remind.data.dialogue import Question
from remind.memory.bank import Bank
from remind.memory.base import Memory, Query
from remind.memory.reranker import NAME
from remind.memory.rmm import RmmBank
from remind.text.words import fillers, stem, words

#: reader: a reader that cites, which is asked elsewhere. oracle: every memory with gold evidence among its sources.
#: noisy: these with probability `USEFUL`, others with `USELESS`. lexical: every memory with at least `SHARED` of the
#: question's words; sees no gold.
CiterName = Literal["none", "reader", "oracle", "noisy", "lexical"]
#: Citers that look at gold evidence.
GOLD = ("oracle", "noisy")
#: Recalls of useful and of useless memories (RMM, Table 3): the latter are cited where they are not left out.
USEFUL, USELESS = 0.911, 0.154
SHARED = 0.5


def cited(citer: CiterName, question: Question, memories: Sequence[Memory]) -> frozenset[int] | None:
    """Places of the memories that an answer would cite; the same for the same question and memories.

    Returns:
        None: it cannot tell, and nothing may be learned: there is no gold evidence, or no citer here.
    """
    if citer in ("none", "reader") or (citer in GOLD and not question.evidence):
        return None
    if citer == "lexical":
        wanted = {stem(word) for word in words(question.text) if word not in fillers()}
        least = max(1.0, SHARED * len(wanted))
        has = [len(wanted & {stem(word) for word in words(memory.text)}) >= least for memory in memories]
    else:
        gold = {*question.evidence}
        has = [not gold.isdisjoint(memory.sources or ()) for memory in memories]
    if citer == "noisy":
        seed = int(sha256_json([question.id, [memory.id for memory in memories]])[:16], 16)
        has = (np.random.default_rng(seed).random(len(has)) < np.where(has, USEFUL, USELESS)).tolist()
    return frozenset(place for place, one in enumerate(has) if one)


def tell(citer: CiterName, bank: Bank, question: Question, k: int) -> None:
    """Tell a bank which of its best k memories an answer to the question would cite."""
    if citer in ("none", "reader"):
        return
    found = bank.retrieve(Query.of(question), k)
    if (places := cited(citer, question, found.memories)) is not None:
        bank.feedback(found, places)


def warning(citer: CiterName) -> str | None:
    """What every report has to say where systems learned; None: they did not, or from shared words."""
    if citer == "reader":
        return (
            "Systems that learn were told after each question which of their memories the reader cites. Their rows "
            "depend on the order of the questions."
        )
    if citer not in GOLD:
        return None
    return (
        f"Systems that learn were told after each question which of their memories the {citer} citer cites, which is "
        "taken from gold evidence. Their rows show what the update rule does, and are not comparable with the others."
    )


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
