"""What a memory of LongMemEval is found by: its own words, expanded by facts, keyphrases or a summary (Section 5.2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

#: What is made to expand keys, and of what: of a whole session, or of every turn.
Expansion = Literal["none", "session-summ", "session-keyphrase", "session-userfact", "turn-keyphrase", "turn-userfact"]
#: separate: expansions are keys beside the words. merge: they stand before the words in one key. replace: they stand in
#: the words' place. With `split-` every fact, phrase or sentence makes a key of its own, else all of them together.
Join = Literal["separate", "merge", "replace", "split-separate", "split-merge", "split-replace"]


def join_keys(words: str, expansions: Sequence[str], join: Join) -> list[str]:
    """The keys of one text. Without expansions they are the words alone."""
    if not expansions:
        return [words]
    parts = list(expansions) if join.startswith("split-") else [" ".join(expansions)]
    if join.endswith("separate"):
        return [words, *parts]
    return [f"{part} {words}" for part in parts] if join.endswith("merge") else parts


@dataclass(frozen=True, slots=True)
class Entry:
    """A user turn as the published code indexes it, whose ids tell gold; no bank ever sees one.

    Attributes:
        id: of its session and the turn, as in `answer_x_3`; those of gold sessions begin with `answer`.
        words: what the user says.
        gold: whether it has evidence.
        expansions: what was extracted from it; None: nothing was asked of it, empty: nothing was found.
    """

    id: str
    words: str
    gold: bool
    expansions: tuple[str, ...] | None


def official_corpus(entries: Iterable[Entry], join: Join, official_quirks: bool = True) -> Iterator[tuple[str, str]]:
    """Ids and texts of what is searched at the level of turns; gold are the ids that begin with `answer`.

    The published code marks a turn without evidence in a gold session by `noans` in its id. With its quirks,

    - separate: expansions keep the session's own id, so that they make gold of every such turn;
    - merge and replace: such turns are not found under their new ids and are never expanded;
    - merge and replace: a turn of which nothing could be extracted is not searched at all.

    Args:
        official_quirks: False: every turn is expanded under its own id and none is left out, as in the banks.
    """
    for entry in entries:
        plain = entry.id if entry.gold else entry.id.replace("answer", "noans", 1)
        if not official_quirks or entry.expansions is None:
            yield from ((plain, key) for key in join_keys(entry.words, entry.expansions or (), join))
        elif join.endswith("separate"):
            yield plain, entry.words
            yield from ((entry.id, key) for key in join_keys(entry.words, entry.expansions, join)[1:])
        elif plain != entry.id:
            yield plain, entry.words
        elif entry.expansions:
            yield from ((plain, key) for key in join_keys(entry.words, entry.expansions, join))
