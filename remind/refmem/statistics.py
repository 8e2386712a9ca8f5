"""What a benchmark holds, as Table 2 of the paper tells it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from remind.data.dialogue import DIMENSIONS, FORMATS, Corpus

_NAMES = {"multi": "Multi-choice", "single": "Single-choice", "direct": "Direct answer"}


def _ratio(total: float, count: float) -> float:
    return round(total / count, 4) if count else 0.0


def statistics(corpus: Corpus, segments: int) -> dict[str, Any]:
    """Counts over dialogues and questions. Words are what white space separates; captions are not counted.

    Answer cardinality: answers per question, correct options or acceptable phrases. Anchors: evidence turns and images
    per question.
    """
    turns = [turn for dialogue in corpus.dialogues for turn in dialogue.turns]
    words = sum(len(turn.text.split()) for turn in turns)
    sessions = sum(len(dialogue.sessions) for dialogue in corpus.dialogues)
    images = sum(len(dialogue.images) for dialogue in corpus.dialogues)
    contexts, questions = len(corpus.dialogues), corpus.questions
    chosen = [question for question in questions if question.format != "direct"]
    formats = Counter(question.format for question in questions)
    dimensions = Counter(question.dimension for question in questions)
    splits = Counter(question.split or "none" for question in questions)
    return {
        "conversations": {
            "contexts": contexts,
            "sessions": sessions,
            "segments": segments,
            "turns": len(turns),
            "images": images,
            "words": words,
            "sessions_per_context": _ratio(sessions, contexts),
            "turns_per_context": _ratio(len(turns), contexts),
            "turns_per_session": _ratio(len(turns), sessions),
            "words_per_context": _ratio(words, contexts),
            "words_per_turn": _ratio(words, len(turns)),
            "images_per_context": _ratio(images, contexts),
        },
        "questions": {
            "total": len(questions),
            "by_format": {name: formats[name] for name in FORMATS},
            "by_dimension": {name: dimensions[name] for name in DIMENSIONS},
            "by_split": dict(sorted(splits.items())),
            "by_dimension_and_format": {
                name: dict(Counter(q.format for q in questions if q.dimension == name)) for name in DIMENSIONS
            },
            "options_per_item": _ratio(sum(len(q.options) for q in chosen), len(chosen)),
            "answer_cardinality": _ratio(sum(len(q.answers) for q in questions), len(questions)),
            "answer_cardinality_by_format": {
                name: _ratio(sum(len(q.answers) for q in questions if q.format == name), formats[name])
                for name in FORMATS
            },
            "anchors_per_item": _ratio(sum(len(q.evidence) + len(q.images) for q in questions), len(questions)),
            "letters_of_single": dict(
                sorted(Counter(answer for q in questions if q.format == "single" for answer in q.answers).items())
            ),
        },
    }


def as_markdown(told: Mapping[str, Any], filters: Mapping[str, Any] | None = None) -> str:
    """The statistics as a page.

    Args:
        filters: counts of the filter stage; None: they are not told.
    """
    talk, asked = told["conversations"], told["questions"]
    total = asked["total"]
    parts = ["# Benchmark statistics", ""]
    parts += _table(
        ("Conversations", ""),
        [
            ("Contexts", _number(talk["contexts"])),
            ("Sessions", _number(talk["sessions"])),
            ("Topic segments", _number(talk["segments"])),
            ("Dialogue turns", _number(talk["turns"])),
            ("Images", _number(talk["images"])),
            ("Words", _number(talk["words"])),
            ("Sessions per context", _number(talk["sessions_per_context"])),
            ("Turns per context", _number(talk["turns_per_context"])),
            ("Turns per session", _number(talk["turns_per_session"])),
            ("Words per context", _number(talk["words_per_context"])),
            ("Words per turn", _number(talk["words_per_turn"])),
            ("Images per context", _number(talk["images_per_context"])),
        ],
    )
    parts += _table(
        ("Questions", ""),
        [
            ("Total", _number(total)),
            *((_NAMES[name], _share(asked["by_format"][name], total)) for name in _NAMES),
            *((f"Split: {name}", _share(count, total)) for name, count in asked["by_split"].items()),
            ("Options per item with options", _number(asked["options_per_item"])),
            ("Answers per item", _number(asked["answer_cardinality"])),
            *(
                (f"Answers per item, {_NAMES[name].lower()}", _number(asked["answer_cardinality_by_format"][name]))
                for name in _NAMES
            ),
            ("Evidence anchors per item", _number(asked["anchors_per_item"])),
            ("Single-choice answers by letter", ", ".join(f"{a} {n}" for a, n in asked["letters_of_single"].items())),
        ],
    )
    rows = []
    for name, count in asked["by_dimension"].items():
        by_format = asked["by_dimension_and_format"][name]
        cells = [_number(by_format.get(form, 0)) for form in _NAMES]
        rows.append((name.replace("_", " ").capitalize(), _share(count, total), *cells))
    parts += _table(("Dimension", "Items", *_NAMES.values()), rows)
    if filters is not None:
        rows = [("written", _number(filters["in"]))]
        rows += [(f"removed: {name.replace('_', ' ')}", _number(count)) for name, count in filters["removed"].items()]
        parts += _table(("Filter", "Items"), [*rows, ("kept", _number(filters["kept"]))])
    return "\n".join(parts)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _share(count: int, total: int) -> str:
    return f"{count:,} ({100 * count / total:.1f}%)" if total else f"{count:,}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' + '---:|' * (len(head) - 1)}"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]
