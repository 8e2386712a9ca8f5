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
from typing import Any, Literal

import yaml

from remind.core.errors import ConfigError
from remind.data.dialogue import FORMATS, Corpus, Dialogue, Format, Image, Question, Session, Turn

Rule = Literal["flag", "none"]
Place = Literal["cue", "reply"]
SPLITS = ("train", "dev", "test")
#: Dimensions of which a speaker has two traits, each bound to a topic.
TOPICAL = ("temporal_dynamics", "topic_scoped_visual_prototypes")
_BOUNDARY = "implicit_boundary_modeling"
_OPTIONS = 4
#: How many options of multiple choice go with each of the values among them.
_PARTS = ((1, 1, 1, 1), (2, 1, 1), (2, 2), (3, 1))


@cache
def lexicon() -> dict[str, Any]:
    """The words of the world (lexicon.yaml); not to be changed."""
    words: dict[str, Any] = yaml.safe_load((files("remind.testbed") / "lexicon.yaml").read_text(encoding="utf-8"))
    return words


@dataclass
class WorldConfig:
    """How many dialogues, and how hard they are."""

    train: int = 30
    """Training dialogues, 20 questions each with two speakers."""
    dev: int = 10
    """Dialogues to choose settings on."""
    test: int = 30
    """Dialogues to report on."""
    speakers: int = 2
    """Speakers of a dialogue, 2 to 6."""
    sessions: int = 6
    """Sessions of a dialogue, 2 or more."""
    evidence: tuple[int, int] = (2, 2)
    """Fewest and most remarks that show a value; in each half of a course over time one fewer, but at least one."""
    contrary: tuple[int, int] = (1, 3)
    """Fewest and most contrary remarks that speak together for one other value."""
    second_voice: float = 0.4
    """Share of the traits with one or two more contrary remarks, for a value of their own."""
    leads: float = 0.25
    """Share of the other remarks that begin with a word that means nothing."""
    rule: Rule = "flag"
    """flag: contrary remarks begin with the flag word, no other remark does. none: the flag is a lead like others."""
    flag_at: Place = "cue"
    """Where a remark of two turns (implicit boundaries) begins with that word: cue, before what the rule is about, as
    in all other remarks; reply: in the turn after it, which a causal model can only join with it at the question."""
    formats: tuple[Format, ...] = FORMATS
    """Formats of the questions, drawn about evenly."""
    by_template: bool = True
    """Training questions and remarks use other wordings than those of dev and test."""
    seed: int = 0
    """Fixes every word."""

    def __post_init__(self) -> None:
        self.evidence = (self.evidence[0], self.evidence[1])
        self.contrary = (self.contrary[0], self.contrary[1])
        self.formats = tuple(self.formats)
        if not 2 <= self.speakers <= len(lexicon()["names"]) // 2:
            raise ConfigError(f"speakers is {self.speakers}; a world has 2 to {len(lexicon()['names']) // 2}")
        if self.sessions < 2:
            raise ConfigError(f"sessions is {self.sessions}; a course over time needs 2 or more")
        if min(self.train, self.dev, self.test) < 0 or self.train + self.dev + self.test < 1:
            raise ConfigError("train, dev and test are numbers of dialogues, 0 or more, and not all 0")
        for name, least in (("evidence", 1), ("contrary", 0)):
            low, high = getattr(self, name)
            if not least <= low <= high:
                raise ConfigError(f"{name} is {(low, high)}; it is the fewest, at least {least}, and the most")
        for name in ("second_voice", "leads"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it is a share, from 0 to 1")
        if self.rule not in ("flag", "none"):
            raise ConfigError(f"rule is {self.rule!r}; it is flag or none")
        if self.flag_at not in ("cue", "reply"):
            raise ConfigError(f"flag_at is {self.flag_at!r}; it is cue or reply")
        if not self.formats or set(self.formats) - set(FORMATS):
            raise ConfigError(f"formats is {list(self.formats)}; there are {', '.join(FORMATS)}")


@dataclass(frozen=True)
class Line:
    """One turn before it has an id."""

    speaker: str
    text: str
    caption: str | None = None


@dataclass(frozen=True)
class Unit:
    """A remark: one turn, or two where it takes a question and what is said to it.

    Attributes:
        trait: number of the trait it belongs to; None: of none.
        value: what its cue speaks for (temporal dynamics: keen or averse).
        counts: whether it is evidence; False: contrary, or of no trait.
        half: 0 or 1 where it has to stand in the first or second half of the sessions, else None.
    """

    lines: tuple[Line, ...]
    trait: int | None = None
    value: str = ""
    counts: bool = False
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
class Asked:
    """A question with what is known of it.

    Attributes:
        own: for every unit of its trait the ids of its turns.
        decoys: the same for units of other traits that are easily taken for its own, the nearest first.
        counting: which of `own` are evidence.
    """

    question: Question
    trait: Trait
    own: tuple[tuple[str, ...], ...]
    counting: tuple[bool, ...]
    decoys: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class World:
    """Dialogues, and their questions with what is known of them."""

    config: WorldConfig
    dialogues: tuple[Dialogue, ...]
    asked: tuple[Asked, ...]

    @property
    def corpus(self) -> Corpus:
        """Without what only the world knows."""
        references = sum(len(item.question.evidence) for item in self.asked)
        return Corpus(self.dialogues, tuple(item.question for item in self.asked), references=references)


def make_world(config: WorldConfig) -> World:
    """The world of a configuration; equal configurations give equal worlds."""
    dialogues: list[Dialogue] = []
    asked: list[Asked] = []
    for split in SPLITS:
        for number in range(getattr(config, split)):
            dialogue, items = Author(config, split, number).write()
            dialogues.append(dialogue)
            asked += items
    return World(config, tuple(dialogues), tuple(asked))


def wordings(items: Sequence[str], split: str | None) -> list[str]:
    """The wordings a split may use: the first ones are for training, the last for dev and test; None: all."""
    cut = max(1, len(items) * 2 // 3)
    return list(items) if split is None else list(items[:cut] if split == "train" else items[cut:] or items[-1:])


class Author:
    """Writes one dialogue. All chance comes from one generator, which split, number and seed fix."""

    def __init__(self, config: WorldConfig, split: str, number: int) -> None:
        self.config, self.split = config, split
        self.id = f"{split}-{number:04d}"
        self.rng = random.Random(f"remind-world:{config.seed}:{split}:{number}")
        self.bank = lexicon()
        self.speakers: list[str] = self.rng.sample(self.bank["names"], config.speakers)
        self.template = split if config.by_template else None
        self._deck: dict[str, list[Any]] = {}

    def write(self) -> tuple[Dialogue, list[Asked]]:
        """The dialogue and its questions, one for each trait."""
        traits = self._traits()
        units = [unit for trait in traits for unit in self._units(trait)] + self._others()
        dialogue, places = self._place(units)
        return dialogue, [self._ask(trait, units, places, dialogue) for trait in traits]

    # what is latent

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

    # how it shows

    def _units(self, trait: Trait) -> list[Unit]:
        values = list(self.bank["dimensions"][trait.dimension]["values"])
        if trait.dimension != "temporal_dynamics":
            return self._remarks(trait, trait.value, values, None)
        units = []
        for half, stance in enumerate(trait.words["phases"]):
            units += self._remarks(trait, stance, ["keen", "averse"], half)
        return units

    def _remarks(self, trait: Trait, value: str, values: list[str], half: int | None) -> list[Unit]:
        config, count = self.config, self.rng.randint(*self.config.evidence)
        if half is not None:
            count = max(1, count - 1)
        units = [self._remark(trait, value, True, half) for _ in range(count)]
        # what contrary remarks say must tell nothing about the true value, so that it may even be the same
        other = self.rng.choice(values)
        most = self.rng.randint(*config.contrary) if half is None else min(2, self.rng.randint(*config.contrary))
        units += [self._remark(trait, other, False, half) for _ in range(most)]
        if half is None and self.rng.random() < config.second_voice:
            other = self.rng.choice(values)
            units += [self._remark(trait, other, False, half) for _ in range(self.rng.randint(1, 2))]
        return units

    def _remark(self, trait: Trait, value: str, counts: bool, half: int | None) -> Unit:
        words = self.bank["dimensions"][trait.dimension]
        cues = words[value] if half is not None else words["values"][value]["cues"]
        # a deck of their own for contrary remarks: which cues are left of one they shared would tell the true value
        cue = self._deal(f"{trait.number} {value} {counts}", cues)
        lead = self._lead(counts)
        if trait.dimension == _BOUNDARY:
            asker = self.rng.choice([name for name in self.speakers if name != trait.speaker])
            frame = self.rng.choice(wordings(words["frames"], self.template))
            dodge = self.rng.choice(wordings(words["dodges"], self.template))
            at_cue, at_reply = (lead, "") if self.config.flag_at == "cue" else ("", lead)
            asked = Line(asker, at_cue + _fill(frame, cue=cue, S=trait.speaker))
            lines = (asked, Line(trait.speaker, at_reply + dodge))
            return Unit(lines, trait.number, value, counts, half)
        scene = self.rng.choice(words["scenes"]) if "scenes" in words else ""
        frame = self.rng.choice(wordings(words["frames"], self.template))
        text = _fill(frame, cue=cue, topic=trait.topic or "", scene=scene)
        if "texts" in words:
            said = self.rng.choice(wordings(words["texts"], self.template))
            return Unit((Line(trait.speaker, lead + said, text),), trait.number, value, counts, half)
        return Unit((Line(trait.speaker, lead + text),), trait.number, value, counts, half)

    def _lead(self, counts: bool) -> str:
        leads, flag = self.bank["leads"], self.bank["flag"]
        if self.config.rule == "flag":
            if not counts:
                return f"{flag}, "
        else:
            leads = [*leads, flag]
            # as often as in a world with the rule, so that the word itself is nothing new there
            if self.rng.random() < 0.4:
                return f"{flag}, "
        return f"{self.rng.choice(leads)}, " if self.rng.random() < self.config.leads else ""

    def _others(self) -> list[Unit]:
        """Frank answers, and small talk."""
        words = self.bank["dimensions"][_BOUNDARY]
        units = []
        for speaker in self.speakers:
            for _ in range(2):
                asker = self.rng.choice([name for name in self.speakers if name != speaker])
                cue = self.rng.choice(words["values"][self.rng.choice(list(words["values"]))]["cues"])
                frame = self.rng.choice(wordings(words["frames"], self.template))
                frank = self.rng.choice(wordings(words["frank"], self.template))
                units.append(Unit((Line(asker, _fill(frame, cue=cue, S=speaker)), Line(speaker, frank))))
        fillers = wordings(self.bank["fillers"], self.template)
        units += [Unit((Line(self.rng.choice(self.speakers), self.rng.choice(fillers)),)) for _ in range(3)]
        return units

    def _place(self, units: Sequence[Unit]) -> tuple[Dialogue, list[tuple[str, ...]]]:
        """The dialogue, and for each unit the ids of its turns."""
        middle = self.config.sessions // 2
        sittings: list[list[int]] = [[] for _ in range(self.config.sessions)]
        for number, unit in enumerate(units):
            low = middle if unit.half == 1 else 0
            high = middle if unit.half == 0 else self.config.sessions
            sittings[self.rng.randrange(low, high)].append(number)
        places: list[tuple[str, ...]] = [()] * len(units)
        sessions, images = [], 0
        for ordinal, numbers in enumerate(sittings, start=1):
            self.rng.shuffle(numbers)
            turns: list[Turn] = []
            for number in numbers:
                ids = []
                for line in units[number].lines:
                    shown: tuple[Image, ...] = ()
                    if line.caption is not None:
                        shown = (Image(images, caption=line.caption),)
                        images += 1
                    ids.append(f"s{ordinal}:{len(turns) + 1}")
                    turns.append(Turn(ids[-1], line.speaker, line.text, images=shown))
                places[number] = tuple(ids)
            if turns:
                sessions.append(Session(f"s{ordinal}", None, tuple(turns)))
        return Dialogue(self.id, tuple(sessions)), places

    # what is asked

    def _ask(self, trait: Trait, units: Sequence[Unit], places: Sequence[tuple[str, ...]], dialogue: Dialogue) -> Asked:
        words = self.bank["dimensions"][trait.dimension]
        kind: Format = self.config.formats[(trait.number + self.rng.randrange(3)) % len(self.config.formats)]
        text = self.rng.choice(wordings(words["ask"], self.template))
        options, answers = self._options(trait, kind)
        own = [number for number, unit in enumerate(units) if unit.trait == trait.number]
        evidence = sorted((turn for number in own if units[number].counts for turn in places[number]), key=_order)
        images = [image.index for turn in evidence for image in dialogue.turn(turn).images]
        question = Question(
            id=f"{self.id}-q{trait.number:02d}",
            dialogue_id=self.id,
            text=_fill(text, S=trait.speaker, topic=trait.topic or ""),
            format=kind,
            options=tuple(options),
            answers=tuple(answers),
            evidence=tuple(evidence),
            images=tuple(images),
            dimension=trait.dimension,
            split=self.split,
        )
        return Asked(
            question,
            trait,
            tuple(places[number] for number in own),
            tuple(units[number].counts for number in own),
            tuple(places[number] for number in self._decoys(trait, units)),
        )

    def _decoys(self, trait: Trait, units: Sequence[Unit]) -> list[int]:
        """Units of other traits: every second one from the same dimension, the rest from anywhere."""
        same = {number for number, unit in enumerate(units) if unit.trait is not None}
        near: list[int] = []
        far: list[int] = []
        dimension = self.bank["dimensions"][trait.dimension]
        stances = {"keen", "averse"} if trait.dimension == "temporal_dynamics" else set(dimension["values"])
        for number, unit in enumerate(units):
            if unit.trait == trait.number:
                continue
            (near if number in same and unit.value in stances else far).append(number)
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


@cache
def statements(dimension: str) -> dict[str, frozenset[str]]:
    """Each option of multiple choice, and the values it goes with."""
    words = lexicon()["dimensions"][dimension]
    if "fits" in words:
        return {text: frozenset(values) for text, values in words["fits"].items()}
    return {text: frozenset([value]) for value, entry in words["values"].items() for text in entry["fits"]}


def _order(turn_id: str) -> tuple[int, int]:
    session, turn = turn_id[1:].split(":")
    return int(session), int(turn)


def _fill(text: str, **values: str) -> str:
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
