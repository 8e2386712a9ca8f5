"""What is thrown out before annotation, and why; every filter counts what it removed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from remind.core.files import write_rows
from remind.data.dialogue import Corpus
from remind.llm.request import ChatModel
from remind.refmem.blind import guessed_by_model, guessed_by_rule
from remind.refmem.config import FilterConfig
from remind.refmem.items import Item, anchors_missing, write_items
from remind.text.words import stems, words

#: In the order in which they are applied; an item is counted under the first that removes it.
REASONS = ("malformed", "evidence", "leak", "uneven", "duplicate", "near_duplicate", "blind")


@dataclass(frozen=True)
class Filtered:
    """Items that stay, and the id and reason of those that do not, in the order of the input.

    Attributes:
        counts: removed items by reason, every reason named.
        no_guess: replies of the chat model that were no guess.
    """

    kept: tuple[Item, ...]
    removed: tuple[tuple[Item, str], ...]
    counts: dict[str, int]
    no_guess: int = 0


def leaks(item: Item) -> bool:
    """Whether the question gives a correct answer away.

    An answer leaks if all its content words stand in the question, or the answer itself does; not if the same is true
    of every option, which tells nothing.
    """
    told, sequence = set(stems(item.question)), words(item.question)

    def stands(text: str) -> bool:
        own, whole = set(stems(text)), words(text)
        within = any(sequence[start : start + len(whole)] == whole for start in range(len(sequence)))
        return bool(own and own <= told) or bool(whole and within)

    if item.format == "direct":
        return any(stands(answer) for answer in item.answers)
    return any(stands(answer) for answer in item.gold) and not all(stands(option) for option in item.options)


def uneven(item: Item, config: FilterConfig) -> bool:
    """Whether the lengths of the options differ so much that they could tell the answer."""
    if not item.options:
        return False
    lengths = [len(" ".join(option.split())) for option in item.options]
    apart = max(lengths) - min(lengths)
    return apart > config.length_slack and max(lengths) > config.length_ratio * min(lengths)


def _similar(bags: Sequence[frozenset[str]], threshold: float) -> set[tuple[int, int]]:
    """Pairs (i < j) of bags whose Jaccard similarity is at least `threshold`; empty bags are like nothing."""
    from scipy.sparse import csr_matrix  # type: ignore[import-untyped]

    columns = {name: place for place, name in enumerate(sorted(frozenset().union(*bags)))}
    where = [columns[name] for bag in bags for name in sorted(bag)]
    ends = np.cumsum([0, *map(len, bags)])
    held = csr_matrix((np.ones(len(where)), where, ends), shape=(len(bags), max(1, len(columns))))
    common = (held @ held.T).tocoo()
    return {
        (int(i), int(j))
        for i, j, shared in zip(common.row, common.col, common.data, strict=True)
        if i < j and shared >= threshold * (len(bags[i]) + len(bags[j]) - shared)
    }


def near_pairs(items: Sequence[Item], threshold: float) -> list[tuple[int, int]]:
    """Pairs (i < j) of items of one dialogue and format that ask nearly the same and have nearly the same answers.

    Jaccard similarity over stems reaches `threshold` for the questions and, apart from them, for the correct answers:
    questions of one wording on two subjects are two questions.
    """
    blocks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        blocks[item.dialogue_id, item.format].append(number)
    pairs = []
    for block in blocks.values():
        asked = [frozenset(stems(items[number].question)) for number in block]
        gold = [frozenset(s for answer in items[number].gold for s in stems(answer, frozenset())) for number in block]
        alike = _similar(asked, threshold) & _similar(gold, threshold)
        pairs += [(block[i], block[j]) for i, j in alike]
    return sorted(pairs)


def _same(item: Item) -> tuple[Any, ...]:
    return (
        item.dialogue_id,
        item.format,
        " ".join(words(item.question)),
        tuple(sorted(" ".join(words(a)) for a in item.gold)),
    )


def apply_filters(
    items: Sequence[Item], corpus: Corpus, config: FilterConfig, chat: ChatModel | None = None
) -> Filtered:
    """Take out what `REASONS` name; of items that are the same, the first stays.

    Args:
        chat: tries to answer without the dialogue; None: rules do (`guessed_by_rule`).

    Raises:
        DataError: an item of a dialogue that is not there.
        ModelError: the endpoint as a whole cannot be used.
    """
    reasons: dict[int, str] = {}

    def left() -> list[int]:
        return [number for number in range(len(items)) if number not in reasons]

    def drop(reason: str, test: Callable[[Item], bool]) -> None:
        reasons.update({number: reason for number in left() if test(items[number])})

    drop("malformed", lambda item: item.problem() is not None)
    drop("evidence", lambda item: anchors_missing(item, corpus.dialogue(item.dialogue_id)))
    drop("leak", leaks)
    drop("uneven", lambda item: uneven(item, config))
    seen: set[tuple[Any, ...]] = set()
    for number in left():
        told = _same(items[number])
        if told in seen:
            reasons[number] = "duplicate"
        seen.add(told)
    rest = left()
    for i, j in near_pairs([items[number] for number in rest], config.near_duplicate):
        if rest[i] not in reasons:
            reasons.setdefault(rest[j], "near_duplicate")
    remaining, no_guess = [items[number] for number in left()], 0
    if chat is None:
        guessed = guessed_by_rule(remaining, config.blind_draws, config.seed)
    else:
        guessed, no_guess = guessed_by_model(remaining, chat, config.blind_draws, config.seed)
    drop("blind", lambda item: item.id in guessed)
    counts = Counter(reasons.values())
    return Filtered(
        tuple(items[number] for number in left()),
        tuple((items[number], reasons[number]) for number in sorted(reasons)),
        {reason: counts[reason] for reason in REASONS},
        no_guess,
    )


def make_filtered(
    folder: Path, items: Sequence[Item], corpus: Corpus, config: FilterConfig, chat: ChatModel | None
) -> dict[str, Any]:
    """Write items.jsonl (what stays) and removed.jsonl; returns the counts."""
    done = apply_filters(items, corpus, config, chat)
    write_items(folder / "items.jsonl", done.kept)
    write_rows(
        folder / "removed.jsonl",
        (
            {"id": i.id, "reason": reason, "question": i.question, "cluster_id": i.cluster_id}
            for i, reason in done.removed
        ),
    )
    return {
        "in": len(items),
        "kept": len(done.kept),
        "removed": done.counts,
        "blind_by": "rules" if chat is None else chat.name,
        "no_guess": done.no_guess,
    }
