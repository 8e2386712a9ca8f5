"""The record of a question's three states, and counts over records that need not be kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from remind.states.pyramid import ReflectiveState, line_of, render, render_target, shown_images
from remind.states.records import FACTUAL, StateRecord, evidence_share, kind_of, pictures_of


def record_of(state: ReflectiveState, split: str) -> StateRecord:
    """The states of one question, rendered, with everything training and evaluation need to know of it."""
    attentional = state.attentional
    factual = attentional.factual
    question, dialogue = factual.question, factual.dialogue
    held = {turn.id for turn in factual.turns}
    held_images = {image.index for turn in factual.turns for image in turn.images}
    return StateRecord(
        question_id=question.id,
        dialogue_id=dialogue.id,
        split=split,
        format=question.format,
        question=question.text,
        options=question.options,
        answers=question.answers,
        dimension=question.dimension,
        category=None if question.category is None else str(question.category),
        visual=question.visual,
        evidence=question.evidence,
        evidence_lines=tuple(line_of(dialogue.turn(turn_id)) for turn_id in question.evidence),
        evidence_found=tuple(turn_id for turn_id in question.evidence if turn_id in held),
        images=question.images,
        images_found=tuple(index for index in question.images if index in held_images),
        target=render_target(factual),
        x0=render(factual),
        x1=render(attentional),
        x2=render(state),
        salience=attentional.salience,
        pictures=pictures_of(factual.turns),
        kind=kind_of(factual),
    )


class Tally:
    """Counts and evidence recall; those of dialogues add up, in whatever process they were counted."""

    #: Attributes that are plain counts; the manifest lists them.
    COUNTS = ("dialogues", "questions", "without_answer", "without_marks", "capped")
    _BY_NAME = ("splits", "kinds", "kinds_as_gold")

    def __init__(self) -> None:
        self.dialogues = self.questions = self.without_answer = self.without_marks = self.capped = 0
        self.splits: Counter[str] = Counter()
        #: Inferred kinds, each with the number of questions whose own dimension it is.
        self.kinds: Counter[str] = Counter()
        self.kinds_as_gold: Counter[str] = Counter()
        #: By kind of question: how many have gold evidence, and the sums of what x0 holds of it and of what is marked.
        self._sums: dict[str, list[float]] = {}

    def add(self, record: StateRecord) -> None:
        self.questions += 1
        self.without_answer += record.target is None
        self.without_marks += not record.x1.markers
        self.splits[record.split] += 1
        if record.kind is not None:
            self.kinds[record.kind] += 1
            self.kinds_as_gold[record.kind] += record.kind == (record.dimension or FACTUAL)
        share = evidence_share(record)
        if share is not None:
            kind = record.dimension or (f"category {record.category}" if record.category else "no category")
            for key in ("all", kind):
                self._add(key, (1, share, _marked_share(record)))

    def dump(self) -> dict[str, Any]:
        """As JSON, for `merge`."""
        counts = {name: getattr(self, name) for name in self.COUNTS}
        return {**counts, **{name: dict(getattr(self, name)) for name in self._BY_NAME}, "sums": self._sums}

    def merge(self, dumped: Mapping[str, Any]) -> None:
        """Add what another tally has counted."""
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + dumped[name])
        for name in self._BY_NAME:
            getattr(self, name).update(dumped[name])
        for key, sums in dumped["sums"].items():
            self._add(key, sums)

    def recall(self) -> dict[str, dict[str, float | int]]:
        """Mean evidence recall of x0 and of x1's blocks over questions with gold evidence, by category, then "all"."""
        return {
            key: {"n": int(n), "x0": held / n, "marked": marked / n}
            for key, (n, held, marked) in sorted(self._sums.items(), key=lambda item: (item[0] == "all", item[0]))
        }

    def _add(self, key: str, sums: tuple[float, ...] | list[float]) -> None:
        self._sums[key] = [a + b for a, b in zip(self._sums.get(key, (0, 0.0, 0.0)), sums, strict=True)]


def _marked_share(record: StateRecord) -> float:
    """Share of the gold evidence inside x1's blocks."""
    pairs = list(zip(record.x1.markers[::2], record.x1.markers[1::2], strict=True))
    marked = [turn for turn in record.x1.turns if any(o[1] <= turn.start and turn.end <= c[0] for o, c in pairs)]
    if record.visual:
        shown = {index for turn in marked for index in shown_images(record.x1, turn)}
        return len(shown & set(record.images)) / len(set(record.images))
    ids = {turn.turn_id for turn in marked}
    return len(ids & set(record.evidence)) / len(set(record.evidence))
