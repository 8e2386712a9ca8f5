"""What a memory of LongMemEval is found by: its own words, expanded by facts, keyphrases or a summary (Section 5.2)."""

from __future__ import annotations

from collections.abc import Sequence
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
