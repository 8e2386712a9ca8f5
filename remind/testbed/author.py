"""Writes one synthetic dialogue: latent states of its speakers, and the scattered turns and captions they show in."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Any

import yaml

from remind.data.dialogue import FORMATS, TEXT_DIMENSIONS

SESSIONS = 6
#: Dimensions whose wrong options can be what is true of somebody else in the dialogue.
_TEMPTING = ("pattern_induction", "belief_modeling", "implicit_boundary_modeling", "personalized_visual_baselines")

Record = dict[str, Any]


@cache
def bank(name: str) -> Any:
    """The content of `<name>.yaml`; not to be changed."""
    return yaml.safe_load((files("remind.testbed") / f"{name}.yaml").read_text(encoding="utf-8"))


@dataclass
class Line:
    """One turn before it has an id. `threads`: numbers of the threads it is evidence for."""

    speaker: str
    text: str
    caption: str | None = None
    threads: list[int] = field(default_factory=list)


Exchange = list[Line]


@dataclass
class Thread:
    """One latent state of one speaker, how it shows, and what can be asked about it.

    Attributes:
        exchanges: what is said, in time order, each in a later session than the one before.
        ask: a question for each format.
        right, wrong, tempting: options for "single": one right, others wrong; the tempting ones are always offered.
        holds, fails: options for "multi".
        forms: acceptable answers for "direct", the gold one first.
    """

    dimension: str
    speaker: str
    state: str
    ask: dict[str, str]
    right: str
    wrong: list[str]
    holds: list[str]
    fails: list[str]
    forms: list[str]
    exchanges: list[Exchange] = field(default_factory=list)
    tempting: list[str] = field(default_factory=list)


class Author:
    """Writes one dialogue. All chance comes from one generator, so seed and number fix every word."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = random.Random(f"remind-sample:{seed}:{number}")
        self.world = bank("world")
        names = 3 if number % 3 == 2 else 2
        self.speakers: list[str] = self.rng.sample(self.world["names"], names)
        self.held: dict[str, set[str]] = {speaker: set() for speaker in self.speakers}
        self.decks: dict[str, list[Any]] = {}

    def write(self) -> tuple[list[list[Line]], list[Thread]]:
        """The turns of each session, and the threads in the order of their numbers: two for every dimension."""
        threads: list[Thread] = []
        pairs = list(combinations(self.speakers, 2))
        for number, dimension in enumerate(TEXT_DIMENSIONS):
            for speaker in pairs[number % len(pairs)]:
                threads.append(self._text_thread(dimension, speaker, len(threads)))
        for speaker in self.speakers[:2]:
            threads.extend(self.pictures(speaker, len(threads)))
        for thread in threads:
            for other in threads:
                if other is not thread and other.dimension == thread.dimension and thread.dimension in _TEMPTING:
                    thread.tempting.append(other.right)
        return self._place(threads), threads

    def _text_thread(self, dimension: str, speaker: str, number: int) -> Thread:
        if dimension == "temporal_dynamics":
            return self.temporal(speaker, number)
        if dimension == "implicit_boundary_modeling":
            return self.boundary(speaker, number)
        return self.remarks(dimension, speaker, number)

    def _place(self, threads: Sequence[Thread]) -> list[list[Line]]:
        """Scatter the exchanges of every thread over the sessions, with greetings and small talk between them."""
        sessions: list[list[Exchange]] = [[] for _ in range(SESSIONS)]
        for thread in threads:
            lightest = sorted(range(SESSIONS), key=lambda s: len(sessions[s]) + 2 * self.rng.random())
            for exchange, place in zip(thread.exchanges, sorted(lightest[: len(thread.exchanges)]), strict=True):
                sessions[place].append(exchange)
        for session in sessions:
            if self.rng.random() < 0.5:
                session.append(self._chat("fillers"))
            self.rng.shuffle(session)
            session.insert(0, self._chat("openers"))
        return [[line for exchange in session for line in exchange] for session in sessions]

    def _chat(self, kind: str) -> Exchange:
        voices = self.rng.sample(self.speakers, 2)
        return [Line(voices[position % 2], text) for position, text in enumerate(self.deal(kind, self.world[kind]))]

    def deal(self, name: str, items: Sequence[Any]) -> Any:
        """One of `items`, none twice before all were dealt."""
        deck = self.decks.setdefault(name, [])
        if not deck:
            deck.extend(self.rng.sample(list(items), len(items)))
        return deck.pop()

    def other(self, speaker: str) -> str:
        return self.rng.choice([name for name in self.speakers if name != speaker])

    def takes(self, speaker: str, state: str) -> bool:
        """Give the speaker a state unless somebody has it already or it clashes with one the speaker has."""
        if any(state in states for states in self.held.values()):
            return False
        for pair in self.world["clashes"]:
            if state in pair and self.held[speaker] & set(pair):
                return False
        self.held[speaker].add(state)
        return True

    def state(self, dimension: str, speaker: str) -> Record:
        """A state for the speaker from the bank of that dimension."""
        states = self.world[dimension]["states"]
        return next(state for state in self.rng.sample(states, len(states)) if self.takes(speaker, state["id"]))

    def say(self, speaker: str, text: str, thread: int) -> Line:
        """A remark that is evidence, sometimes with a lead-in."""
        if self.rng.random() < 0.3:
            lead = self.deal("leads", self.world["leads"])
            text = lead + (text if re.match(r"I\b", text) else text[0].lower() + text[1:])
        return Line(speaker, text, threads=[thread])

    def reply(self, speaker: str) -> Exchange:
        """Sometimes a word from somebody else that tells nothing."""
        if self.rng.random() < 0.25:
            return [Line(self.other(speaker), self.deal("replies", self.world["replies"]))]
        return []

    def ask(self, dimension: str, state: Record, **names: str) -> dict[str, str]:
        asks = self.world[dimension].get("ask", {})
        return {kind: fill(state.get(kind) or self.rng.choice(asks[kind]), **names) for kind in FORMATS}

    def temporal(self, speaker: str, thread: int) -> Thread:
        """A stance on a pastime that changes twice; somebody else once says the opposite of the same pastime."""
        dimension = "temporal_dynamics"
        world = self.world[dimension]
        phrases = world["phases"]
        topic = next(t for t in self.rng.sample(world["topics"], len(world["topics"])) if self.takes(speaker, t))
        course = self.rng.choice(world["trajectories"])
        aside = self.rng.randrange(3)
        exchanges = []
        for position, phase in enumerate(course["phases"]):
            exchange = [self.say(speaker, fill(self.deal(phase, phrases[phase]), topic=topic), thread)]
            if position == aside:
                contrary = "averse" if phase in ("keen", "curious", "back") else "keen"
                text = fill(self.deal(contrary, phrases[contrary]), topic=topic)
                exchange.append(Line(self.other(speaker), text))
            exchanges.append(exchange)
        return Thread(
            dimension,
            speaker,
            topic,
            self.ask(dimension, {}, S=speaker, topic=topic),
            course["label"],
            [other["label"] for other in world["trajectories"] if other is not course],
            *course_statements(course["phases"], speaker, topic),
            course["forms"],
            exchanges,
        )

    def remarks(self, dimension: str, speaker: str, thread: int) -> Thread:
        """A habit, a value or an experience: three remarks, none of which says it outright."""
        states, state = self.world[dimension]["states"], self.state(dimension, speaker)
        others = [other for other in states if other is not state]
        if dimension == "experience_grounded_planning":
            lines, right, wrong, fails = state["lines"], state["right"], state["wrong"], state["unfit"]
        else:
            lines, right = self.rng.sample(state["lines"], 3), state["label"]
            wrong = [other["label"] for other in others]
            fails = [self.rng.choice(other["fits"]) for other in others]
        return Thread(
            dimension,
            speaker,
            state["id"],
            self.ask(dimension, state, S=speaker),
            right,
            wrong,
            state["fits"],
            fails,
            state["forms"],
            [[self.say(speaker, line, thread), *self.reply(speaker)] for line in lines],
        )

    def boundary(self, speaker: str, thread: int) -> Thread:
        """A subject dodged three times, and another one answered frankly."""
        dimension = "implicit_boundary_modeling"
        world, state = self.world[dimension], self.state(dimension, speaker)
        exchanges = []
        for question in self.rng.sample(state["asks"], 3):
            dodge = self.deal("deflections", world["deflections"])
            asked = Line(self.other(speaker), question, threads=[thread])
            exchanges.append([asked, Line(speaker, dodge, threads=[thread])])
        others = [other for other in world["states"] if other is not state]
        frank = self.rng.choice([o for o in others if not any(o["id"] in states for states in self.held.values())])
        answer = [Line(self.other(speaker), self.rng.choice(frank["asks"])), Line(speaker, frank["open"][0])]
        exchanges.insert(self.rng.randrange(4), answer)
        return Thread(
            dimension,
            speaker,
            state["id"],
            self.ask(dimension, {}, S=speaker),
            state["label"],
            [other["label"] for other in others],
            state["fits"],
            [self.rng.choice(other["fits"]) for other in others],
            state["forms"],
            exchanges,
            tempting=[frank["label"]],
        )

    def pictures(self, speaker: str, first: int) -> list[Thread]:
        """The three visual threads of a speaker: five pictures in one style, three of them of one topic with one motif.

        `first`: number of the first of them.
        """
        inference, baseline, prototype = (
            "cross_modal_latent_inference",
            "personalized_visual_baselines",
            "topic_scoped_visual_prototypes",
        )
        topic, style, hidden = (self.state(d, speaker) for d in (prototype, baseline, inference))
        topics, styles = self.world[prototype]["states"], self.world[baseline]["states"]
        motif = self.rng.choice(topic["features"])
        items = self.rng.sample(topic["items"], len(topic["items"]))

        def shot(text: str, caption: str, *threads: int) -> Exchange:
            return [Line(speaker, text, f"{caption}, {style['phrase']}", list(threads)), *self.reply(speaker)]

        captions = [f"{items.pop()} {motif['phrase']}" for _ in range(3)]
        texts = self.rng.sample(topic["texts"], 3)
        shown = [shot(text, caption, first + 1, first + 2) for text, caption in zip(texts, captions, strict=True)]
        elsewhere = self.rng.choice([other for other in topics if other is not topic])
        stray = shot(self.rng.choice(elsewhere["texts"]), self.rng.choice(elsewhere["items"]), first + 1)
        telling = shot(hidden["text"], hidden["caption"], first, first + 1)

        scenes = self.rng.sample(self.world[baseline]["scenes"], 8)
        unlike = self.rng.sample([other for other in styles if other is not style], len(styles) - 1)
        near = [feature for feature in topic["features"] if feature is not motif]
        far = [feature["label"] for other in topics if other is not topic for feature in other["features"]]
        return [
            Thread(
                inference,
                speaker,
                hidden["id"],
                self.ask(inference, hidden, S=speaker, subject=hidden["subject"]),
                fill(hidden["label"], S=speaker),
                [fill(other["label"], S=speaker) for other in self.world[inference]["states"] if other is not hidden],
                [fill(text, S=speaker) for text in hidden["holds"]],
                [fill(text, S=speaker) for text in hidden["fails"]],
                hidden["forms"],
                [telling],
            ),
            Thread(
                baseline,
                speaker,
                style["id"],
                self.ask(baseline, {}, S=speaker),
                style["label"],
                [other["label"] for other in unlike],
                [f"{scene}, {style['phrase']}" for scene in scenes[:4]],
                [f"{scene}, {other['phrase']}" for scene, other in zip(scenes[4:], unlike, strict=False)],
                style["forms"],
                [stray],
            ),
            Thread(
                prototype,
                speaker,
                topic["id"],
                self.ask(prototype, {}, S=speaker, topic=topic["topic"]),
                motif["label"],
                [feature["label"] for feature in near] + [self.rng.choice(far)],
                [f"{item} {motif['phrase']}" for item in items[:4]],
                [f"{item} {feature['phrase']}" for item, feature in zip(items, near, strict=False)],
                motif["forms"],
                shown,
            ),
        ]


def fill(text: str, **values: str) -> str:
    """`text` with its slots filled, the first letter in upper case."""
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text[0].upper() + text[1:]


def course_statements(phases: Sequence[str], speaker: str, topic: str) -> tuple[list[str], list[str]]:
    """Statements about a changing stance, as (true ones, false ones); what the turns leave open is in neither."""
    first, last = phases[0], phases[-1]
    unclear = first == "curious"
    claims: list[tuple[str, bool | None]] = [
        (f"At first {speaker} was keen on {topic}.", first == "keen"),
        (f"At first {speaker} wanted nothing to do with {topic}.", None if unclear else first == "averse"),
        (f"In the end {speaker} had given up {topic}.", last == "quit"),
        (f"In the end {speaker} was happy with {topic}.", last in ("keen", "back")),
        (f"{speaker} gave up {topic} and later returned to it.", "back" in phases),
        (f"{speaker} was keen on {topic} at some point.", "keen" in phases),
        (f"{speaker} tried {topic} after refusing it.", None if unclear else first == "averse"),
        (f"{speaker}'s view of {topic} never changed.", False),
        (f"{speaker} lost interest in {topic} before giving it up.", True if phases[1] == "doubt" else None),
        (f"{speaker}'s view of {topic} turned more than once.", True if unclear or "back" in phases else None),
    ]
    return [text for text, true in claims if true], [text for text, true in claims if true is False]
