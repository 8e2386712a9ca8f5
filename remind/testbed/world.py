"""A synthetic world of dialogues whose every answer follows from a latent state that is known.

Each speaker has one latent value in each dimension (two where it is bound to a topic). It shows in remarks scattered
over the sessions, one cue word at a time, never by its name. Contrary remarks of the same speaker speak for other
values, drawn without regard to the true one. Where the world has its rule, a contrary remark begins with the flag word
and does not count; without it nothing in the dialogue tells it from evidence, and only markers or a summary help.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, Any, Literal, NamedTuple

import yaml

from remind.core.errors import ConfigError
from remind.data.dialogue import FORMATS, SPLITS, Corpus, Dialogue, Format, Image, Question, Session, Turn
from sae.ranges import NonNegativeInt, PositiveInt, Range, Share, check_ranges

#: Dimensions of which a speaker has two traits, each bound to a topic.
TOPICAL = ("temporal_dynamics", "topic_scoped_visual_prototypes")
BOUNDARY = "implicit_boundary_modeling"
_OPTIONS = 4
#: How many options of multiple choice go with each of the values among them.
_PARTS = ((1, 1, 1, 1), (2, 1, 1), (2, 2), (3, 1))


@cache
def lexicon() -> dict[str, Any]:
    """The content of lexicon.yaml; not to be changed."""
    words: dict[str, Any] = yaml.safe_load((files("remind.testbed") / "lexicon.yaml").read_text(encoding="utf-8"))
    return words


@cache
def statements(dimension: str) -> dict[str, frozenset[str]]:
    """The options of multiple choice in a dimension, and the values that each of them goes with."""
    words = lexicon()["dimensions"][dimension]
    if "fits" in words:
        return {text: frozenset(values) for text, values in words["fits"].items()}
    return {text: frozenset([value]) for value, entry in words["values"].items() for text in entry["fits"]}


def wordings(items: Sequence[str], split: str | None) -> list[str]:
    """The wordings a split may use: the first ones are for training, the last for dev and test; None: all."""
    cut = max(1, len(items) * 2 // 3)
    return list(items) if split is None else list(items[:cut] if split == "train" else items[cut:] or items[-1:])


def fill(text: str, **values: str) -> str:
    """`text` with each `{name}` in it replaced."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text


@dataclass
class WorldConfig:
    """How many dialogues, and how hard they are."""

    train: NonNegativeInt = 30
    """Training dialogues, 20 questions each with two speakers."""
    dev: NonNegativeInt = 10
    """Dialogues to choose settings on."""
    test: NonNegativeInt = 30
    """Dialogues to report on."""
    speakers: Annotated[int, Range(ge=2, le=6)] = 2
    """Speakers of a dialogue, 2 to 6."""
    sessions: Annotated[int, Range(ge=2)] = 6
    """Sessions of a dialogue, 2 or more."""
    evidence: tuple[PositiveInt, PositiveInt] = (2, 2)
    """Fewest and most remarks that show a value; in each half of a course over time one fewer, but at least one."""
    contrary: tuple[NonNegativeInt, NonNegativeInt] = (1, 3)
    """Minimum and maximum number of contrary remarks that suggest one other value."""
    second_voice: Share = 0.4
    """Share of the traits with one or two more contrary remarks, for a value of their own."""
    leads: Share = 0.25
    """Share of the other remarks that begin with a word without meaning."""
    rule: Literal["flag", "none"] = "flag"
    """flag: contrary remarks begin with the flag word, no other remark does. none: the flag is a lead like others."""
    flag_at: Literal["cue", "reply"] = "cue"
    """Where a remark of two turns (implicit boundaries) begins with that word: cue, before what the rule is about, as
    in all other remarks; reply: in the turn after it, which a causal model can only join with it at the question."""
    formats: tuple[Format, ...] = FORMATS
    """Formats of the questions, drawn about evenly."""
    by_template: bool = True
    """Training questions and remarks use other wordings than those of dev and test."""
    seed: NonNegativeInt = 0
    """Fixes every word."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.train + self.dev + self.test < 1:
            raise ConfigError("train, dev and test are numbers of dialogues, and not all 0")
        for name in ("evidence", "contrary"):
            low, high = getattr(self, name)
            if low > high:
                raise ConfigError(f"{name} must be the fewest and the most, not {(low, high)}")
        if not self.formats:
            raise ConfigError(f"formats is empty; there are {', '.join(FORMATS)}")


class Line(NamedTuple):
    """One turn before it has an id."""

    speaker: str
    text: str
    caption: str | None = None


class Remark(NamedTuple):
    """One turn, or two: a question and its answer.

    Attributes:
        trait: number of the trait it belongs to; None: of none.
        value: what its cue speaks for (temporal dynamics: keen or averse).
        is_evidence: False: contrary, or of no trait.
        half: 0 or 1 where it has to stand in the first or second half of the sessions, else None.
    """

    lines: tuple[Line, ...]
    trait: int | None = None
    value: str = ""
    is_evidence: bool = False
    half: int | None = None


@dataclass(frozen=True)
class Trait:
    """A latent value of a speaker, in a dimension, about a topic where the dimension has topics."""

    number: int
    dimension: str
    speaker: str
    value: str
    topic: str | None = None

    @property
    def words(self) -> dict[str, Any]:
        """The entry of its value in the lexicon."""
        words: dict[str, Any] = lexicon()["dimensions"][self.dimension]["values"][self.value]
        return words


@dataclass(frozen=True)
class WorldQuestion:
    """A question with the trait it asks for, and the remarks of its dialogue that matter to it.

    Attributes:
        remarks: for every remark of its trait the ids of its turns.
        is_evidence: which of `remarks` are evidence; the others are contrary.
        decoys: turn ids of remarks of other traits that are easily confused with its own, the nearest first.
    """

    question: Question
    trait: Trait
    remarks: tuple[tuple[str, ...], ...]
    is_evidence: tuple[bool, ...]
    decoys: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class World:
    """Dialogues, and their questions with the traits behind them."""

    config: WorldConfig
    dialogues: tuple[Dialogue, ...]
    questions: tuple[WorldQuestion, ...]

    @property
    def corpus(self) -> Corpus:
        """Dialogues and questions without the traits."""
        questions = tuple(item.question for item in self.questions)
        return Corpus(self.dialogues, questions, referenced={one.id: len(one.evidence) for one in questions})


def make_world(config: WorldConfig) -> World:
    """The world of a configuration; equal configurations give equal worlds."""
    dialogues: list[Dialogue] = []
    questions: list[WorldQuestion] = []
    for split in SPLITS:
        for number in range(getattr(config, split)):
            dialogue, own_questions = _DialogueWriter(config, split, number).write()
            dialogues.append(dialogue)
            questions += own_questions
    return World(config, tuple(dialogues), tuple(questions))


class _DialogueWriter:
    """Writes one dialogue. All chance comes from one generator, which split, number and seed fix."""

    def __init__(self, config: WorldConfig, split: str, number: int) -> None:
        self.config, self.split = config, split
        self.id = f"{split}-{number:04d}"
        self.rng = random.Random(f"remind-world:{config.seed}:{split}:{number}")
        self.bank = lexicon()
        self.speakers: list[str] = self.rng.sample(self.bank["names"], config.speakers)
        self.template = split if config.by_template else None
        self._deck: dict[str, list[Any]] = {}

    def write(self) -> tuple[Dialogue, list[WorldQuestion]]:
        """The dialogue and its questions, one for each trait."""
        traits = self._traits()
        remarks = [remark for trait in traits for remark in self._remarks(trait)] + self._small_talk()
        dialogue, turn_ids = self._place(remarks)
        return dialogue, [self._question(trait, remarks, turn_ids, dialogue) for trait in traits]

    def _traits(self) -> list[Trait]:
        traits: list[Trait] = []
        for dimension, words in self.bank["dimensions"].items():
            topics = [None]
            if dimension in TOPICAL:
                # all speakers talk of the same topics: the topic alone does not tell whose remark it is
                topics = self.rng.sample(words["topics"], 2)
            for speaker in self.speakers:
                for topic in topics:
                    value = self.rng.choice(list(words["values"]))
                    traits.append(Trait(len(traits), dimension, speaker, value, topic))
        return traits

    def _remarks(self, trait: Trait) -> list[Remark]:
        values = list(self.bank["dimensions"][trait.dimension]["values"])
        if trait.dimension != "temporal_dynamics":
            return self._remarks_for(trait, trait.value, values, None)
        remarks = []
        for half, stance in enumerate(trait.words["phases"]):
            remarks += self._remarks_for(trait, stance, ["keen", "averse"], half)
        return remarks

    def _remarks_for(self, trait: Trait, value: str, values: list[str], half: int | None) -> list[Remark]:
        config, count = self.config, self.rng.randint(*self.config.evidence)
        if half is not None:
            count = max(1, count - 1)
        remarks = [self._remark(trait, value, True, half) for _ in range(count)]
        # what contrary remarks say must tell nothing about the true value, so that it may even be the same
        other = self.rng.choice(values)
        count = self.rng.randint(*config.contrary)
        if half is not None:
            count = min(2, count)
        remarks += [self._remark(trait, other, False, half) for _ in range(count)]
        if half is None and self.rng.random() < config.second_voice:
            other = self.rng.choice(values)
            remarks += [self._remark(trait, other, False, half) for _ in range(self.rng.randint(1, 2))]
        return remarks

    def _remark(self, trait: Trait, value: str, is_evidence: bool, half: int | None) -> Remark:
        words = self.bank["dimensions"][trait.dimension]
        cues = words[value] if half is not None else words["values"][value]["cues"]
        # a deck of their own for contrary remarks: which cues are left of one they shared would tell the true value
        cue = self._deal(f"{trait.number} {value} {is_evidence}", cues)
        lead = self._lead(is_evidence)
        if trait.dimension == BOUNDARY:
            asker = self._other_speaker(trait.speaker)
            frame, dodge = self._wording(words["frames"]), self._wording(words["dodges"])
            at_cue, at_reply = (lead, "") if self.config.flag_at == "cue" else ("", lead)
            question = Line(asker, at_cue + fill(frame, cue=cue, S=trait.speaker))
            lines: tuple[Line, ...] = (question, Line(trait.speaker, at_reply + dodge))
        else:
            scene = self.rng.choice(words["scenes"]) if "scenes" in words else ""
            text = fill(self._wording(words["frames"]), cue=cue, topic=trait.topic or "", scene=scene)
            if "texts" in words:  # the cue shows in a picture
                lines = (Line(trait.speaker, lead + self._wording(words["texts"]), text),)
            else:
                lines = (Line(trait.speaker, lead + text),)
        return Remark(lines, trait.number, value, is_evidence, half)

    def _lead(self, is_evidence: bool) -> str:
        leads, flag = self.bank["leads"], self.bank["flag"]
        if self.config.rule == "flag":
            if not is_evidence:
                return f"{flag}, "
        else:
            leads = [*leads, flag]
            # as often as in a world with the rule, so that the word itself is nothing new there
            if self.rng.random() < 0.4:
                return f"{flag}, "
        return f"{self.rng.choice(leads)}, " if self.rng.random() < self.config.leads else ""

    def _small_talk(self) -> list[Remark]:
        """Frank answers, and remarks about nothing."""
        words = self.bank["dimensions"][BOUNDARY]
        remarks = []
        for speaker in self.speakers:
            for _ in range(2):
                asker = self._other_speaker(speaker)
                cue = self.rng.choice(words["values"][self.rng.choice(list(words["values"]))]["cues"])
                frame, frank = self._wording(words["frames"]), self._wording(words["frank"])
                remarks.append(Remark((Line(asker, fill(frame, cue=cue, S=speaker)), Line(speaker, frank))))
        for _ in range(3):
            remarks.append(Remark((Line(self.rng.choice(self.speakers), self._wording(self.bank["fillers"])),)))
        return remarks

    def _other_speaker(self, speaker: str) -> str:
        return self.rng.choice([name for name in self.speakers if name != speaker])

    def _wording(self, items: Sequence[str]) -> str:
        return self.rng.choice(wordings(items, self.template))

    def _place(self, remarks: Sequence[Remark]) -> tuple[Dialogue, list[tuple[str, ...]]]:
        """The dialogue, and for each remark the ids of its turns."""
        middle = self.config.sessions // 2
        numbers_by_session: list[list[int]] = [[] for _ in range(self.config.sessions)]
        for number, remark in enumerate(remarks):
            low = middle if remark.half == 1 else 0
            high = middle if remark.half == 0 else self.config.sessions
            numbers_by_session[self.rng.randrange(low, high)].append(number)
        turn_ids: list[tuple[str, ...]] = [()] * len(remarks)
        sessions, images = [], 0
        for ordinal, numbers in enumerate(numbers_by_session, start=1):
            self.rng.shuffle(numbers)
            turns: list[Turn] = []
            for number in numbers:
                ids = []
                for line in remarks[number].lines:
                    shown: tuple[Image, ...] = ()
                    if line.caption is not None:
                        shown = (Image(images, caption=line.caption),)
                        images += 1
                    ids.append(f"s{ordinal}:{len(turns) + 1}")
                    turns.append(Turn(ids[-1], line.speaker, line.text, images=shown))
                turn_ids[number] = tuple(ids)
            if turns:
                sessions.append(Session(f"s{ordinal}", None, tuple(turns)))
        return Dialogue(self.id, tuple(sessions)), turn_ids

    def _question(
        self, trait: Trait, remarks: Sequence[Remark], turn_ids: Sequence[tuple[str, ...]], dialogue: Dialogue
    ) -> WorldQuestion:
        kind: Format = self.config.formats[(trait.number + self.rng.randrange(3)) % len(self.config.formats)]
        text = self._wording(self.bank["dimensions"][trait.dimension]["ask"])
        options, answers = self._options(trait, kind)
        own = [number for number, remark in enumerate(remarks) if remark.trait == trait.number]
        evidence = sorted(
            (turn for number in own if remarks[number].is_evidence for turn in turn_ids[number]),
            key=dialogue.positions.__getitem__,
        )
        question = Question(
            id=f"{self.id}-q{trait.number:02d}",
            dialogue_id=self.id,
            text=fill(text, S=trait.speaker, topic=trait.topic or ""),
            format=kind,
            options=tuple(options),
            answers=tuple(answers),
            evidence=tuple(evidence),
            images=tuple(image.index for turn in evidence for image in dialogue.turn(turn).images),
            dimension=trait.dimension,
            split=self.split,
        )
        return WorldQuestion(
            question,
            trait,
            tuple(turn_ids[number] for number in own),
            tuple(remarks[number].is_evidence for number in own),
            tuple(turn_ids[number] for number in self._decoys(trait, remarks)),
        )

    def _decoys(self, trait: Trait, remarks: Sequence[Remark]) -> list[int]:
        """Remarks that are not of the trait: every second one from its dimension, the rest from anywhere."""
        values = set(self.bank["dimensions"][trait.dimension]["values"])
        stances = {"keen", "averse"} if trait.dimension == "temporal_dynamics" else values
        near, far = list[int](), list[int]()
        for number, remark in enumerate(remarks):
            if remark.trait != trait.number:
                (near if remark.value in stances else far).append(number)
        self.rng.shuffle(near)
        self.rng.shuffle(far)
        mixed: list[int] = []
        while near or far:
            mixed += [pile.pop() for pile in (near, far) if pile]
        return mixed

    def _options(self, trait: Trait, kind: Format) -> tuple[list[str], list[str]]:
        values: dict[str, Any] = self.bank["dimensions"][trait.dimension]["values"]
        if kind == "direct":
            return [], list(trait.words["label"])
        if kind == "single":
            wrong = self.rng.sample([value for value in values if value != trait.value], _OPTIONS - 1)
            options = [trait.value, *wrong]
            self.rng.shuffle(options)
            return [values[value]["label"][0] for value in options], ["ABCD"[options.index(trait.value)]]
        fits = statements(trait.dimension)
        if "fits" in self.bank["dimensions"][trait.dimension]:
            # any of them: every value goes with one to three of every four
            chosen = self.rng.sample(list(fits), _OPTIONS)
        else:
            # the true value may have any of the parts, or the options alone would tell which it is
            parts = self.rng.choice(_PARTS)
            shown = [trait.value, *self.rng.sample([value for value in values if value != trait.value], len(parts) - 1)]
            shares = zip(shown, self.rng.sample(parts, len(parts)), strict=True)
            chosen = [text for value, part in shares for text in self.rng.sample(values[value]["fits"], part)]
        self.rng.shuffle(chosen)
        return chosen, [letter for letter, text in zip("ABCD", chosen, strict=True) if trait.value in fits[text]]

    def _deal(self, name: str, items: Sequence[Any]) -> Any:
        """One of `items`, none twice before all were dealt."""
        deck = self._deck.setdefault(name, [])
        if not deck:
            deck.extend(self.rng.sample(list(items), len(items)))
        return deck.pop()
