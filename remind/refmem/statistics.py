"""Counts of a benchmark, as in Table 2 of the paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from remind.data.dialogue import DIMENSIONS, FORMATS, Corpus

_TITLES = {"multi": "Multi-choice", "single": "Single-choice", "direct": "Direct answer"}


def statistics(corpus: Corpus, segments: int) -> dict[str, Any]:
    """Counts over dialogues and questions. Words are what white space separates; captions are not counted.

    Answer cardinality: answers per question, correct options or acceptable phrases. Anchors: evidence turns and images
    per question.
    """
    questions = corpus.questions
    turns = [turn for dialogue in corpus.dialogues for turn in dialogue.turns]
    words = sum(len(turn.text.split()) for turn in turns)
    sessions = sum(len(dialogue.sessions) for dialogue in corpus.dialogues)
    images = sum(len(dialogue.images) for dialogue in corpus.dialogues)
    contexts = len(corpus.dialogues)
    formats = Counter(question.format for question in questions)
    dimensions = Counter(question.dimension for question in questions)
    splits = Counter(question.split or "none" for question in questions)
    letters = Counter(answer for q in questions if q.format == "single" for answer in q.answers)
    return {
        "conversations": {
            "contexts": contexts,
            "sessions": sessions,
            "segments": segments,
            "turns": len(turns),
            "images": images,
            "words": words,
            "sessions_per_context": _mean(sessions, contexts),
            "turns_per_context": _mean(len(turns), contexts),
            "turns_per_session": _mean(len(turns), sessions),
            "words_per_context": _mean(words, contexts),
            "words_per_turn": _mean(words, len(turns)),
            "images_per_context": _mean(images, contexts),
        },
        "questions": {
            "total": len(questions),
            "by_format": {name: formats[name] for name in FORMATS},
            "by_dimension": {name: dimensions[name] for name in DIMENSIONS},
            "by_split": dict(sorted(splits.items())),
            "by_dimension_and_format": {
                name: dict(Counter(q.format for q in questions if q.dimension == name)) for name in DIMENSIONS
            },
            "options_per_item": _mean(sum(len(q.options) for q in questions), len(questions) - formats["direct"]),
            "answer_cardinality": _mean(sum(len(q.answers) for q in questions), len(questions)),
            "answer_cardinality_by_format": {
                name: _mean(sum(len(q.answers) for q in questions if q.format == name), formats[name])
                for name in FORMATS
            },
            "anchors_per_item": _mean(sum(len(q.evidence) + len(q.images) for q in questions), len(questions)),
            "letters_of_single": dict(sorted(letters.items())),
        },
    }


def as_markdown(counts: Mapping[str, Any], filters: Mapping[str, Any] | None = None) -> str:
    """The statistics as a page.

    Args:
        filters: counts of the filter stage; None: left out.
    """
    questions = counts["questions"]
    total = questions["total"]
    per_format = questions["answer_cardinality_by_format"]
    letters = ", ".join(f"{letter} {count}" for letter, count in questions["letters_of_single"].items())
    rows = [
        ("Total", _number(total)),
        *((title, _share(questions["by_format"][name], total)) for name, title in _TITLES.items()),
        *((f"Split: {name}", _share(count, total)) for name, count in questions["by_split"].items()),
        ("Options per item with options", _number(questions["options_per_item"])),
        ("Answers per item", _number(questions["answer_cardinality"])),
        *((f"Answers per item, {title.lower()}", _number(per_format[name])) for name, title in _TITLES.items()),
        ("Evidence anchors per item", _number(questions["anchors_per_item"])),
        ("Single-choice answers by letter", letters),
    ]
    dimensions = []
    for name, count in questions["by_dimension"].items():
        by_format = questions["by_dimension_and_format"][name]
        cells = [_number(by_format.get(kind, 0)) for kind in _TITLES]
        dimensions.append((_title(name), _share(count, total), *cells))
    parts = ["# Benchmark statistics", ""]
    parts += _table(("Conversations", ""), [(_title(key), _number(n)) for key, n in counts["conversations"].items()])
    parts += _table(("Questions", ""), rows) + _table(("Dimension", "Items", *_TITLES.values()), dimensions)
    if filters is not None:
        steps = [
            ("written", filters["in"]),
            *((f"removed: {name.replace('_', ' ')}", count) for name, count in filters["removed"].items()),
            ("kept", filters["kept"]),
        ]
        parts += _table(("Filter", "Items"), [(name, _number(count)) for name, count in steps])
    return "\n".join(parts)


def _mean(total: float, count: float) -> float:
    return round(total / count, 4) if count else 0.0


def _title(name: str) -> str:
    return name.replace("_", " ").capitalize()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _share(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / total:.1f}%)" if total else f"{count:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' + '---:|' * (len(head) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
