"""A benchmark from its items: train and test 2:8 by evidence cluster, and its counts as in Table 2 of the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

from scipy.cluster.hierarchy import DisjointSet  # type: ignore[import-untyped]

from remind.data.dialogue import DIMENSIONS, FORMATS, Corpus
from remind.evaluation.tables import markdown_table
from remind.refmem.drafts import near_pairs
from remind.refmem.items import Item


def units(items: Sequence[Item], corpus: Corpus, near_duplicate: float) -> list[list[int]]:
    """Indices of the items that must stay together, so that no cluster and no piece of evidence is in both splits.

    They share a cluster, an evidence turn or an image, or are near-duplicates.
    """
    dialogues = corpus.dialogues
    turn_of = {(one.id, image.index): turn.id for one in dialogues for turn in one.turns for image in turn.images}
    together = DisjointSet(range(len(items)))
    first: dict[tuple[str, ...], int] = {}
    for number, item in enumerate(items):
        turns = {*item.evidence, *(turn_of[item.dialogue_id, index] for index in item.images)}
        for key in (("cluster", item.cluster_id), *((item.dialogue_id, turn) for turn in turns)):
            together.merge(number, first.setdefault(key, number))
    for i, j in near_pairs(items, near_duplicate):
        together.merge(i, j)
    return [sorted(group) for group in together.subsets()]


def split(items: Sequence[Item], corpus: Corpus, train: float, seed: int, near_duplicate: float) -> dict[str, str]:
    """Item id to "train" or "test".

    Units are dealt in an order of their ids and the seed; one goes to train while that brings its share closer to
    `train`. With two units or more, and 0 < `train` < 1, each split gets at least one.
    """
    dealt = sorted(
        units(items, corpus, near_duplicate),
        key=lambda unit: sha256(f"{seed}:{min(items[number].id for number in unit)}".encode()).hexdigest(),
    )
    target, taken = train * len(items), 0
    chosen: set[int] = set()
    for place, unit in enumerate(dealt):
        if abs(taken + len(unit) - target) < abs(taken - target) and (train == 1 or len(chosen) < len(dealt) - 1):
            chosen.add(place)
            taken += len(unit)
    if not chosen and 0 < train < 1 and len(dealt) > 1:
        chosen = {min(range(len(dealt)), key=lambda place: (len(dealt[place]), place))}
    return {
        items[number].id: "train" if place in chosen else "test" for place, unit in enumerate(dealt) for number in unit
    }


def statistics(corpus: Corpus, segments: int) -> dict[str, Any]:
    """Counts over dialogues and questions. Words are what white space separates; captions are not counted.

    Answer cardinality: answers per question, correct options or acceptable phrases. Anchors: evidence turns and images
    per question.
    """
    dialogues, questions = corpus.dialogues, corpus.questions
    sessions = [session for dialogue in dialogues for session in dialogue.sessions]
    words = [len(turn.text.split()) for dialogue in dialogues for turn in dialogue.turns]
    images = [len(dialogue.images) for dialogue in dialogues]
    by_format = {name: [q for q in questions if q.format == name] for name in FORMATS}
    letters = Counter(answer for q in by_format["single"] for answer in q.answers)
    return {
        "conversations": {
            "contexts": len(dialogues),
            "sessions": len(sessions),
            "segments": segments,
            "turns": len(words),
            "images": sum(images),
            "words": sum(words),
            "sessions_per_context": _mean([len(dialogue.sessions) for dialogue in dialogues]),
            "turns_per_context": _mean([len(dialogue.turns) for dialogue in dialogues]),
            "turns_per_session": _mean([len(session.turns) for session in sessions]),
            "turns_per_segment": round(len(words) / segments, 4) if segments else 0.0,
            "words_per_context": _mean([sum(len(turn.text.split()) for turn in one.turns) for one in dialogues]),
            "words_per_turn": _mean(words),
            "images_per_context": _mean(images),
        },
        "questions": {
            "total": len(questions),
            "by_format": {name: len(own) for name, own in by_format.items()},
            "by_dimension": {name: sum(q.dimension == name for q in questions) for name in DIMENSIONS},
            "by_split": dict(sorted(Counter(q.split or "none" for q in questions).items())),
            "by_dimension_and_format": {
                name: dict(Counter(q.format for q in questions if q.dimension == name)) for name in DIMENSIONS
            },
            "options_per_item": _mean([len(q.options) for q in questions if q.format != "direct"]),
            "answer_cardinality": _mean([len(q.answers) for q in questions]),
            "answer_cardinality_by_format": {
                name: _mean([len(q.answers) for q in own]) for name, own in by_format.items()
            },
            "anchors_per_item": _mean([len(q.evidence) + len(q.images) for q in questions]),
            "letters_of_single": dict(sorted(letters.items())),
        },
    }


def as_markdown(counts: Mapping[str, Any], filters: Mapping[str, Any] | None = None) -> str:
    """The statistics as a page.

    Args:
        filters: counts of the filter stage, if there was one.
    """
    questions = dict(counts["questions"])
    cells, total = questions.pop("by_dimension_and_format"), questions["total"]
    rows = []
    for key, value in questions.items():
        whole = key.startswith("by_")
        for name, number in value.items() if isinstance(value, Mapping) else [("", value)]:
            share = f" ({100 * number / total:.1f}%)" if whole and total else ""
            rows.append((f"{_title(key)} {name.replace('_', ' ')}".strip(), _number(number) + share))
    dimensions = [[_title(name), *(_number(own.get(kind, 0)) for kind in FORMATS)] for name, own in cells.items()]
    parts = [
        "# Benchmark statistics\n",
        markdown_table(
            ["Conversations", ""], [(_title(key), _number(n)) for key, n in counts["conversations"].items()]
        ),
        markdown_table(["Questions", ""], rows),
        markdown_table(["Dimension", *FORMATS], dimensions),
    ]
    if filters is not None:
        removed = ((f"removed: {name.replace('_', ' ')}", _number(n)) for name, n in filters["removed"].items())
        steps = [("written", _number(filters["in"])), *removed, ("kept", _number(filters["kept"]))]
        parts.append(markdown_table(["Filter", "Items"], steps))
    return "\n".join(parts)


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
