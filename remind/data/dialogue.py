"""Dialogues and questions about them: Image, Turn, Session, Dialogue, Question, Corpus."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar

from remind.core.errors import DataError, named, shown

T = TypeVar("T")
Format = Literal["single", "multi", "direct"]
FORMATS: tuple[Format, ...] = ("single", "multi", "direct")
SPLITS = ("train", "dev", "test")

TEXT_DIMENSIONS = (
    "temporal_dynamics",
    "pattern_induction",
    "belief_modeling",
    "experience_grounded_planning",
    "implicit_boundary_modeling",
)
VISUAL_DIMENSIONS = (
    "cross_modal_latent_inference",
    "personalized_visual_baselines",
    "topic_scoped_visual_prototypes",
)
#: The eight reflective-memory dimensions (Appendix D.5). Evidence of the visual ones is image indices, else lines.
DIMENSIONS = TEXT_DIMENSIONS + VISUAL_DIMENSIONS

#: The answer to questions whose premise the dialogue does not support (LoCoMo category 5).
NO_INFORMATION = "No information available"


@dataclass(frozen=True, slots=True)
class Image:
    """An image shared in a turn.

    Attributes:
        index: 0-based over the whole dialogue, in order of appearance; never renumbered after retrieval.
        path: a file inside the data folder, or None if only a caption or a remote reference is known.
        caption: what the image shows, or None.
        source: the reference in the file (URL or file name); never fetched.
    """

    index: int
    path: str | None = None
    caption: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One utterance. `time` is ISO 8601 if the file has an absolute time, otherwise the text in the file, or None."""

    id: str
    speaker: str
    text: str
    time: str | None = None
    images: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Session:
    """Part of a dialogue without long breaks: turns in order. `time` as in `Turn`."""

    id: str
    time: str | None
    turns: tuple[Turn, ...]


@dataclass(frozen=True)
class Dialogue:
    """A whole history. Session and turn ids are unique in it; image indices count 0, 1, 2, … in order of appearance.

    Attributes:
        turns: all turns in time order.
        positions: turn id to its position in `turns`.
        session_of: turn id to its session.
        speakers: in order of first appearance.

    Raises:
        DataError: no turns, a session or turn id twice, or image indices out of order.
    """

    id: str
    sessions: tuple[Session, ...]
    turns: tuple[Turn, ...] = field(init=False, repr=False, compare=False)
    positions: dict[str, int] = field(init=False, repr=False, compare=False)
    session_of: dict[str, Session] = field(init=False, repr=False, compare=False)
    speakers: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        turns = tuple(turn for session in self.sessions for turn in session.turns)
        images = [image for turn in turns for image in turn.images]
        positions = {turn.id: position for position, turn in enumerate(turns)}
        problem = None if turns else "the dialogue has no turns"
        if len({session.id for session in self.sessions}) < len(self.sessions):
            problem = "a session id occurs twice; ids must be unique in a dialogue"
        elif len(positions) < len(turns):
            twice = next(turn.id for position, turn in enumerate(turns) if positions[turn.id] != position)
            problem = f"turn id {shown(twice)} occurs twice; ids must be unique in a dialogue"
        elif wrong := [image.index for number, image in enumerate(images) if image.index != number]:
            problem = f"image index {wrong[0]} is out of order; images count from 0 over the whole dialogue"
        if problem is not None:
            raise DataError(problem, record=named(self.id))
        self.__dict__.update(
            turns=turns,
            positions=positions,
            session_of={turn.id: session for session in self.sessions for turn in session.turns},
            speakers=tuple(dict.fromkeys(turn.speaker for turn in turns)),
        )

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for turn in self.turns for image in turn.images)

    def illustrated(self, show: Callable[[Image], Image]) -> Dialogue:
        """With other images in the places of its own."""
        sessions = []
        for one in self.sessions:
            turns = (replace(turn, images=tuple(map(show, turn.images))) for turn in one.turns)
            sessions.append(replace(one, turns=tuple(turns)))
        return replace(self, sessions=tuple(sessions))

    def turn(self, turn_id: str) -> Turn:
        """The turn of that id. Raises DataError if there is none."""
        if turn_id not in self.positions:
            raise DataError(f"no turn {shown(turn_id)}", record=named(self.id))
        return self.turns[self.positions[turn_id]]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one dialogue.

    Attributes:
        format: "single" (one option), "multi" (a set of options) or "direct" (free text).
        options: option texts, the first is letter A; empty for "direct".
        answers: option letters for "single" and "multi", acceptable answers for "direct"; empty if unknown.
        evidence: ids of the gold evidence turns that exist in the dialogue.
        images: gold image indices.
        dimension: one of `DIMENSIONS`, or None for questions of other benchmarks.
        category: the benchmark's own category (LoCoMo: 1-5; LongMemEval: question type), else None.
        time: when the question is asked, if the benchmark says so.
        split: "train", "dev", "test" or None.
    """

    id: str
    dialogue_id: str
    text: str
    format: Format = "direct"
    options: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    images: tuple[int, ...] = ()
    dimension: str | None = None
    category: int | str | None = None
    time: str | None = None
    split: str | None = None

    @property
    def visual(self) -> bool:
        """Whether its evidence is images (Table 10) rather than dialogue lines (Table 9)."""
        return self.dimension in VISUAL_DIMENSIONS

    @property
    def unanswerable(self) -> bool:
        """Whether the dialogue does not contain the answer (LoCoMo category 5; LongMemEval ids that say so)."""
        return self.format == "direct" and (NO_INFORMATION in self.answers or self.id.endswith("_abs"))


def gold_turns(question: Question, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Indices of the turns that are gold evidence or, for a visual question, show a gold image."""
    images = set(question.images) if question.visual else set()
    return tuple(
        index
        for index, turn in enumerate(turns)
        if turn.id in question.evidence or any(image.index in images for image in turn.images)
    )


@dataclass(frozen=True, slots=True)
class Dangling:
    """An evidence reference, verbatim, that matches no turn of its dialogue."""

    question_id: str
    reference: str


@dataclass(frozen=True)
class Corpus:
    """Dialogues with questions about them, as a reader returns them.

    Attributes:
        dialogues, questions: in file order; questions of RefMem-Bench in the order of their dialogues.
        dangling: evidence references that resolve to nothing; left out of `Question.evidence` and to be reported.
        referenced: number of evidence references in the files, including the dangling ones, by question id.
        blank: number of turns in the files without words and images, such as tool calls; left out of the dialogues.

    Raises:
        DataError: a dialogue or question id twice, or a question whose dialogue is missing.
    """

    dialogues: tuple[Dialogue, ...]
    questions: tuple[Question, ...] = ()
    dangling: tuple[Dangling, ...] = ()
    referenced: Mapping[str, int] = field(repr=False, compare=False, default_factory=dict)
    blank: int = 0
    _by_id: dict[str, Dialogue] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        for dialogue in self.dialogues:
            if dialogue.id in self._by_id:
                raise DataError(f"dialogue id {shown(dialogue.id)} occurs twice")
            self._by_id[dialogue.id] = dialogue
        seen: set[str] = set()
        for question in self.questions:
            if question.id in seen:
                raise DataError(f"question id {shown(question.id)} occurs twice")
            seen.add(question.id)
            if question.dialogue_id not in self._by_id:
                what = f"its dialogue {shown(question.dialogue_id)} is not in the file"
                raise DataError(what, record=named(question.id))

    @property
    def references(self) -> int:
        """Number of evidence references in the files."""
        return sum(self.referenced.values())

    def dialogue(self, dialogue_id: str) -> Dialogue:
        """The dialogue of that id. Raises DataError if there is none."""
        try:
            return self._by_id[dialogue_id]
        except KeyError:
            raise DataError(f"no dialogue {shown(dialogue_id)}") from None

    def by_dialogue(self) -> Iterator[tuple[Dialogue, list[Question]]]:
        """Each dialogue with its questions, in file order."""
        groups: dict[str, list[Question]] = {dialogue.id: [] for dialogue in self.dialogues}
        for question in self.questions:
            groups[question.dialogue_id].append(question)
        for dialogue in self.dialogues:
            yield dialogue, groups[dialogue.id]

    @staticmethod
    def merge(parts: Sequence[Corpus], paths: Sequence[str | Path] | None = None) -> Corpus:
        """One corpus of several. `paths`: the file of each part, for errors.

        Raises:
            DataError: a dialogue or question id that occurs twice; names both files if `paths` are given.
        """
        first: dict[tuple[str, str], str | Path] = {}
        for part, path in zip(parts, paths or [], strict=paths is not None):
            note_ids(part, path, first)
        return Corpus(
            dialogues=tuple(d for part in parts for d in part.dialogues),
            questions=tuple(q for part in parts for q in part.questions),
            dangling=tuple(d for part in parts for d in part.dangling),
            referenced={name: count for part in parts for name, count in part.referenced.items()},
            blank=sum(part.blank for part in parts),
        )


def note_ids(
    corpus: Corpus, path: str | Path, first: dict[tuple[str, str], str | Path], record: str | None = None
) -> None:
    """Add the ids of a file, or of a record in it, to `first`: ("dialogue" or "question", id) to where it stands first.

    Raises:
        DataError: an id that is there already; names both places.
    """
    place = path if record is None else f"{path} [{record}]"
    ids = [("dialogue", dialogue.id) for dialogue in corpus.dialogues]
    for key in ids + [("question", question.id) for question in corpus.questions]:
        if key in first:
            raise DataError(f"{key[0]} id {shown(key[1])} occurs twice, first in {first[key]}", path, record)
        first[key] = place


def spread(questions: Sequence[T], limit: int | None) -> list[T]:
    """`limit` of the questions, evenly apart, since benchmarks have them in order of category. None: all."""
    count = len(questions) if limit is None else min(limit, len(questions))
    return [questions[number * len(questions) // count] for number in range(count)]
