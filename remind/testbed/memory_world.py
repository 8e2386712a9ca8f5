"""A world to learn remembering in: people who tell of changing facts, dated events and routines, and chatter.

Questions have exact answers, and a reader without any model answers them from a memory, so that rewards have no noise
of a judge. The reader is a fool in one way: it takes jokes at their word, so that keeping them does harm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from random import Random
from typing import NamedTuple

from remind.data.dialogue import Session, Turn
from remind.memory.operations import State

USER = "User"
NAMES = ("Ana", "Ben", "Caro", "Dev", "Eli", "Fay", "Gus", "Hana", "Ivo", "Jun", "Kim", "Leo")
#: Attributes of the user by the store they belong to, each with its values.
ATTRIBUTES = {
    "core": {
        "city": ("rome", "oslo", "lima", "cairo", "delhi", "quito", "paris", "accra"),
        "job": ("cook", "nurse", "pilot", "baker", "judge", "clerk", "miner", "tailor"),
    },
    "semantic": {
        "pet": ("dog", "cat", "parrot", "rabbit", "turtle", "pony", "hamster", "goat"),
        "food": ("pasta", "rice", "curry", "salad", "tacos", "sushi", "stew", "pizza"),
        "colour": ("red", "blue", "green", "black", "white", "pink", "grey", "gold"),
        "sport": ("tennis", "chess", "rowing", "golf", "judo", "skiing", "boxing", "rugby"),
        "drink": ("coffee", "juice", "milk", "water", "cocoa", "cider", "soda", "beer"),
        "music": ("jazz", "rock", "opera", "folk", "blues", "techno", "soul", "punk"),
        "flower": ("rose", "tulip", "lily", "daisy", "iris", "poppy", "violet", "lotus"),
        "season": ("spring", "summer", "autumn", "winter", "monsoon", "harvest", "carnival", "advent"),
    },
}
PLACES = (
    *("museum", "park", "beach", "market", "library", "theatre", "castle", "zoo", "harbour", "stadium"),
    *("garden", "temple", "cinema", "bakery", "lake", "forest"),
)
TASKS = ("tea", "bread", "soup", "laundry", "exercise", "painting", "packing", "cleaning", "studying", "planting")
STEPS = (
    *("boil", "stir", "wait", "mix", "rest", "chop", "soak", "rinse", "dry", "fold", "stretch", "run", "sketch"),
    *("blend", "sort", "list", "sweep", "polish", "read", "note", "dig", "spray", "measure", "taste"),
)
#: How a day before the session's is told, and how many days it is back.
DAYS = {"today": 0, "yesterday": 1, "last week": 7}
SMALL_TALK = (
    *("nice weather again", "how are you doing", "i feel fine thanks", "what a long week", "good to hear you"),
    *("let us talk soon", "that sounds great", "i could use a nap", "time flies so fast", "see you later then"),
)
#: Forms of questions, and what they are in words.
QUESTIONS = {
    "current": "What is my {} now?",
    "previous": "What was my {} before that?",
    "when": "On which day did I last visit the {}?",
    "who": "Who was with me when I last visited the {}?",
    "count": "How many times did I visit the {}?",
    "first": "What do I do first for {}?",
    "second": "What do I do second for {}?",
    "third": "What do I do third for {}?",
}
FORMS = tuple(QUESTIONS)
UNKNOWN = "not answerable"
#: Words of retrieved entries that a reader is given, words it reads of each, characters of the core block.
CONTEXT_WORDS, ENTRY_WORDS, CORE_CHARACTERS, TOP = 60, 24, 500, 10
_ATTRIBUTE = re.compile(r"\bmy (\w+) is (?:now )?(\w+)")
_EVENT = re.compile(r"\b(today|yesterday|last week) i visited the (\w+) with (\w+)")
_ROUTINE = re.compile(r"\bfor (\w+) i (\w+) then (\w+) then (\w+)")
_DATED = re.compile(r"(\d{4}-\d\d-\d\d): (.*)")


@dataclass(frozen=True)
class Said:
    """A turn of the user.

    Attributes:
        store: where it belongs; "": it is chatter and belongs nowhere.
        key: the attribute, place or task that it tells of; of chatter the one it seems to tell of, or "".
    """

    text: str
    store: str = ""
    key: str = ""


@dataclass(frozen=True)
class Ask:
    """A question: its form (`FORMS`), what it is about, and the answer."""

    form: str
    key: str
    answer: str

    @property
    def text(self) -> str:
        return QUESTIONS[self.form].format(self.key)


@dataclass(frozen=True)
class Meeting:
    """A session: its day, its turns, and questions on what is known after it.

    Attributes:
        rewarded: what rewards are computed from.
        held_out: other questions on the same session, never rewarded.
    """

    id: str
    day: date
    turns: tuple[Said, ...]
    rewarded: tuple[Ask, ...]
    held_out: tuple[Ask, ...]

    @property
    def session(self) -> Session:
        """As it would stand in a file of dialogues."""
        turns = (Turn(f"{self.id}:{n}", USER, turn.text) for n, turn in enumerate(self.turns, start=1))
        return Session(self.id, self.day.isoformat(), tuple(turns))


@dataclass(frozen=True)
class Life:
    """A dialogue, and questions on all of it."""

    id: str
    meetings: tuple[Meeting, ...]
    final: tuple[Ask, ...]


@dataclass
class Knowledge:
    """What some lines tell: the truth from all turns that are none of chatter, or what a reader makes of a memory."""

    attributes: dict[str, list[tuple[date, str]]] = field(default_factory=dict)
    events: dict[str, dict[date, str]] = field(default_factory=dict)
    routines: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def learn(self, day: date, text: str) -> None:
        """Take in one line that was said on a day."""
        for key, value in _ATTRIBUTE.findall(text):
            self.attributes.setdefault(key, []).append((day, value))
        for when, place, person in _EVENT.findall(text):
            self.events.setdefault(place, {})[day - timedelta(DAYS[when])] = person
        for task, *steps in _ROUTINE.findall(text):
            self.routines[task] = tuple(steps)

    def answer(self, form: str, key: str) -> str:
        """Of a question; `UNKNOWN` where nothing was learnt."""
        if form in ("current", "previous"):
            # a stable sort: of one day the last
            values = [value for _, value in sorted(self.attributes.get(key, []), key=lambda one: one[0])]
            older = [value for value in values if value != values[-1]]
            return next(reversed(values if form == "current" else older), UNKNOWN)
        if form in ("when", "who", "count"):
            if not (events := self.events.get(key)):
                return UNKNOWN
            last = max(events)
            return {"when": last.isoformat(), "who": events[last], "count": str(len(events))}[form]
        steps = self.routines.get(key)
        return steps[("first", "second", "third").index(form)] if steps else UNKNOWN

    def claims(self) -> set[tuple[object, ...]]:
        """Every single thing that was learnt."""
        attributes = {(key, value) for key, told in self.attributes.items() for _, value in told}
        events = {(place, *visit) for place, visits in self.events.items() for visit in visits.items()}
        return {*attributes, *events, *self.routines.items()}

    def questions(self) -> Iterator[Ask]:
        """All that can be asked and has an answer."""
        told = ([*self.attributes], FORMS[:2]), ([*self.events], FORMS[2:5]), ([*self.routines], FORMS[5:])
        for keys, names in told:
            for key in keys:
                asks = (Ask(form, key, self.answer(form, key)) for form in names)
                yield from (ask for ask in asks if ask.answer != UNKNOWN)


def make_life(seed: int, number: int, sessions: int = 8) -> Life:
    """One dialogue, a function of the seed and its number."""
    random = Random(f"memory world {seed} {number}")
    names = random.sample(NAMES, 4)[1:]
    # which kind is told most changes from dialogue to dialogue
    kinds = ("episodic", "semantic", "procedural")
    turned = kinds[number % 3 :] + kinds[: number % 3]
    known, day, meetings = Knowledge(), date(2023, 1, 5) + timedelta(random.randrange(90)), []
    for n in range(sessions):
        day += timedelta(random.randint(9, 20))
        turns = _turns(random, names, turned, known)
        for turn in turns:
            if turn.store:
                known.learn(day, turn.text)
        told = {turn.key for turn in turns if turn.store}
        asks = list(known.questions())
        here, before = [ask for ask in asks if ask.key in told], [ask for ask in asks if ask.key not in told]
        random.shuffle(here)
        random.shuffle(before)
        chosen = [*here[:8], *before[:1], unknown(random, known)]
        random.shuffle(chosen)
        meetings.append(Meeting(f"S{n + 1}", day, tuple(turns), tuple(chosen[::2]), tuple(chosen[1::2])))
    asks = list(known.questions())
    random.shuffle(asks)
    return Life(f"life-{seed}-{number}", tuple(meetings), (*asks[:18], *(unknown(random, known) for _ in range(2))))


def unknown(random: Random, known: Knowledge) -> Ask:
    """A question that what was told does not answer."""
    keys = [key for group in ATTRIBUTES.values() for key in group if key not in known.attributes]
    places = [place for place in PLACES if place not in known.events]
    return Ask("current", random.choice(keys), UNKNOWN) if keys else Ask("when", random.choice(places), UNKNOWN)


def _turns(random: Random, names: Sequence[str], kinds: Sequence[str], known: Knowledge) -> list[Said]:
    """Six to ten turns, half of them chatter; no key is told twice."""
    turns: list[Said] = []
    keys: set[str] = set()
    size = random.randint(6, 10)
    while len(turns) < size // 2:
        turn = _fact(random, names, random.choices(kinds, (0.6, 0.3, 0.1))[0], known)
        if turn.key not in keys:
            keys.add(turn.key)
            turns.append(turn)
    turns += [_chatter(random, names) for _ in range(size - len(turns))]
    random.shuffle(turns)
    return turns


def _fact(random: Random, names: Sequence[str], kind: str, known: Knowledge) -> Said:
    if kind == "episodic":
        place = random.choice(PLACES)
        return Said(f"{random.choice([*DAYS])} i visited the {place} with {random.choice(names)}", kind, place)
    if kind == "procedural":
        task = random.choice(TASKS)
        steps = known.routines.get(task) or random.sample(STEPS, 3)
        return Said(f"for {task} i {' then '.join(steps)}", kind, task)
    store = "core" if random.random() < 0.3 else "semantic"
    key = random.choice([*ATTRIBUTES[store]])
    told = known.attributes.get(key)
    value = random.choice([value for value in ATTRIBUTES[store][key] if not told or value != told[-1][1]])
    return Said(f"my {key} is {'now ' if told else ''}{value}", store, key)


def _chatter(random: Random, names: Sequence[str]) -> Said:
    """Small talk, a joke, or what holds for others."""
    kind = random.randrange(3)
    if not kind:
        return Said(random.choice(SMALL_TALK))
    key = random.choice([*ATTRIBUTES["semantic"]])
    value = random.choice(ATTRIBUTES["semantic"][key])
    return Said(
        f"haha my {key} is {value}" if kind == 1 else f"{random.choice(names)} says his {key} is {value}", "", key
    )


# the reader


class Reading(NamedTuple):
    """An answer from a memory, and the stores of the entries that were retrieved for it."""

    answer: str
    retrieved: tuple[str, ...]


def read(state: State, asks: Iterable[Ask]) -> list[Reading]:
    """Answers from the core block and the newest entries that name what is asked about.

    At most `TOP` entries and `CONTEXT_WORDS` words are given, `ENTRY_WORDS` of each entry.
    """
    block, size = list[str](), 0
    # of the core block the newest lines that fit
    for line in reversed(state.block.text.split("\n") if state.block else []):
        if (size := size + len(line)) > CORE_CHARACTERS:
            break
        block.insert(0, line)
    newest = sorted(state.current("episodic", "semantic", "procedural"), key=lambda one: one.time or "", reverse=True)
    words = [(one.store, one.text.split()[:ENTRY_WORDS]) for one in newest]
    readings = []
    for ask in asks:
        found, room = list[tuple[str, str]](), CONTEXT_WORDS
        for store, text in words:
            if ask.key in text and len(found) < TOP and len(text) <= room:
                found.append((store, " ".join(text)))
                room -= len(text)
        known = learnt([*block, *(line for _, text in reversed(found) for line in text.split(" | "))])
        readings.append(Reading(known.answer(ask.form, ask.key), tuple(store for store, _ in found)))
    return readings


def learnt(lines: Iterable[str]) -> Knowledge:
    """What lines tell, each with its day before it, oldest first; others tell nothing."""
    known = Knowledge()
    for line in lines:
        if match := _DATED.fullmatch(line):
            known.learn(date.fromisoformat(match[1]), match[2])
    return known


# the expert


@dataclass(frozen=True)
class Expert:
    """Who keeps what it should, less some, and some chatter. It has blind spots: a share of the keys.

    Attributes:
        blind: share of keys that it overlooks mostly.
        missed: chance that it overlooks a fact of such a key.
        kept: chance that it keeps a joke or what holds for others.
        blurred: share of keys of which it mostly tells without detail, where it writes in its own words (SaliMory).
    """

    blind: float = 0.4
    missed: float = 0.75
    kept: float = 0.45
    blurred: float = 0.3

    def overlooks(self, key: str) -> bool:
        """Whether the key is a blind spot; the same in every dialogue."""
        return Random(f"blind {key}").random() < self.blind

    def tells(self, turn: Said, random: Random) -> str:
        """What it writes of a turn: its words, or the first half of them."""
        blurs = turn.store and Random(f"blurred {turn.key}").random() < self.blurred and random.random() < self.missed
        words = turn.text.split()
        return " ".join(words[: len(words) // 2] if blurs else words)

    def keeps(self, turn: Said, random: Random) -> str:
        """The store that it puts a turn in; ""; none."""
        if turn.store:
            return "" if self.overlooks(turn.key) and random.random() < self.missed else turn.store
        return "semantic" if turn.key and random.random() < self.kept else ""


#: Who makes no mistakes: the upper bound of what can be had in this world.
ORACLE = Expert(blind=0, missed=0, kept=0, blurred=0)


def vocabulary() -> list[str]:
    """Every word that turns are made of, sorted."""
    values = [word for group in ATTRIBUTES.values() for key, words in group.items() for word in (key, *words)]
    rest = " ".join([*SMALL_TALK, *DAYS, "my is now i visited the with for then haha says his"])
    return sorted({*NAMES, *values, *PLACES, *TASKS, *STEPS, *rest.split()})
