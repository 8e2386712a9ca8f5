"""SaliMory's task in the memory world (arXiv 2606.04120): a filter, a booster and a utilizer, one after the other.

An episode is a stretch of a dialogue and a question on it. The filter replies `YES` or `NO` to every turn, the booster
writes what it keeps in words of its own (`ADD FACT my pet is dog`, `UPDATE m2 PREFERENCE my food is now rice`,
`DELETE m1 WORKING`), the utilizer names the entries that answer the question (`m1 m4`). What judges decide in the paper
is a rule here: whether an answer is right, and what an entry tells, against what was said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from datetime import date, timedelta
from functools import partial
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

from remind.data.dialogue import Session, Turn
from remind.llm.request import Request
from remind.llm.structured import NotValid, read_value
from remind.memory.operations import BANKS, Entry, Occasion, Operation, State, fold, propose, undated
from remind.memory.salimory import SCHEMAS, listed, request, shown
from remind.memory_training.config import SaliMoryConfig
from remind.memory_training.episodes import Episode, Scores, together
from remind.memory_training.pico import END, LISTED, SHOWN, speech_of, spoken
from remind.memory_training.rewards import Judged, Played, scores
from remind.testbed import memory_world as world
from remind.testbed.memory_world import Ask, Expert, Knowledge, Life, Meeting, Said, learnt, unknown

YES, NO = f"YES {END}", f"NO {END}"
#: Days that an entry stays in working memory.
WINDOW = timedelta(7)


class Told(NamedTuple):
    """A turn, and when it was said."""

    id: str
    session: str
    day: date
    said: Said


class Window(NamedTuple):
    """What an episode is about.

    Attributes:
        asks: questions that are trained on; the first is the episode's, and all say which turns are salient.
    """

    life: str
    told: tuple[Told, ...]
    asks: tuple[Ask, ...]


class Asked(NamedTuple):
    """What a role is asked.

    Attributes:
        entries: of the memory, shown as m1, m2, ...
        turn, day: of filter and booster.
        ask: of the utilizer.
    """

    role: str
    entries: tuple[Entry, ...] = ()
    turn: Said | None = None
    ask: Ask | None = None
    day: date = date.min

    def prompt(self) -> str:
        """As words of pico's vocabulary."""
        entries = [f"{one.store.upper()} {undated(one.text)} m{n}" for n, one in enumerate(self.entries, start=1)]
        what = self.turn.text if self.turn else f"{self.ask.form} {self.ask.key}" if self.ask else ""
        return " ".join([f"<{self.role}>", *entries, what, "<ops>"])

    def request(self) -> Request:
        """As `remind run-memory` asks a chat model."""
        entries = {"entries": listed((one.store, one.text) for one in self.entries)}
        if self.turn is None:
            return request(self.role, "", {**entries, "question": self.ask.text if self.ask else ""})
        told = shown(Session("", self.day.isoformat(), ()), Turn("", world.USER, self.turn.text))
        return request(self.role, "", {**told, **entries} if self.role == "booster" else told)

    def as_json(self, reply: str) -> str:
        """Commands as a chat model replies them; a profile is the texts of the entries that are named."""
        if self.role == "filter":
            return json.dumps({"salient": reply == YES})
        if self.turn:
            return compile_reply(reply, self.day)
        named = _named(reply, self.entries) or ()
        used = [n for n, one in enumerate(self.entries, start=1) if one in named]
        return json.dumps({"profile": "; ".join(self.entries[n - 1].text for n in used), "used": used})

    def from_json(self, text: str) -> str:
        """A chat model's reply as commands, read as `remind run-memory` reads it; the booster's stays JSON."""
        if self.role == "booster":
            return text.replace(END, "?")
        if (value := read_reply(text, self.role)) is None:
            return "?"
        if self.role == "filter":
            return YES if value["salient"] else NO
        return " ".join([*(f"m{n}" for n in sorted(set(value["used"])) if 1 <= n <= len(self.entries)), END])


class Profile(NamedTuple):
    """What the utilizer was shown for a question, and the entries that it named in its order; None: unreadable."""

    shown: tuple[Entry, ...]
    used: tuple[Entry, ...] | None

    def answer(self, ask: Ask) -> str:
        """By the reader of the memory world, from as many entries as it is given room for."""
        lines: list[tuple[str, str]] = []
        room = world.CONTEXT_WORDS
        for one in self.used or ():
            words = one.text.split()[: world.ENTRY_WORDS]
            if len(words) <= room:
                room -= len(words)
                lines.append((one.time or "", " ".join(words)))
        known = learnt(line for _, line in sorted(lines, key=lambda one: one[0]))
        return known.answer(ask.form, ask.key)

    def quality(self, ask: Ask) -> float:
        """μ: F1 of the entries that it named among those that tell of what is asked about."""
        right = {one.id for one in self.shown if ask.key in undated(one.text).split()}
        named = {one.id for one in self.used or ()}
        if self.used is None or not (right and named):
            return float(self.used is not None and right == named)
        return 2 * len(right & named) / (len(right) + len(named))


def told(meeting: Meeting) -> list[Told]:
    """The turns of a session."""
    return [Told(f"{meeting.id}:{n}", meeting.id, meeting.day, said) for n, said in enumerate(meeting.turns, start=1)]


def windows(life: Life, turns: int) -> Iterator[Window]:
    """Stretches of a dialogue: each session after the one before it, the last turns of both."""
    for number in range(len(life.meetings)):
        both = life.meetings[max(number - 1, 0) : number + 1]
        here = [one for meeting in both for one in told(meeting)][-turns:]
        known, random = Knowledge(), Random(f"window {life.id} {number}")
        for one in here:
            if one.said.store:
                known.learn(one.day, one.said.text)
        asks = [*known.questions(), unknown(random, known)]
        random.shuffle(asks)
        yield Window(life.id, tuple(here), tuple(asks[::2]))


def rollout(
    life: str, sessions: Sequence[Sequence[Told]], asks: Sequence[Ask], limits: tuple[int, int] = (SHOWN, LISTED)
) -> Generator[list[Asked], list[str], Played]:
    """The roles go through sessions with an empty memory and then answer questions on it (Algorithm 1, phases A-C).

    Args:
        limits: entries that booster and utilizer are shown, at most.
    """
    state, flagged, valid = State(), list[str](), list[bool]()
    for turns in sessions:
        verdicts = yield [Asked("filter", turn=one.said, day=one.day) for one in turns]
        valid += [reply in (YES, NO) for reply in verdicts]
        for one in (one for one, reply in zip(turns, verdicts, strict=True) if reply == YES):
            flagged.append(one.id)
            old = [e for e in state.current("working") if one.day - date.fromisoformat(e.time or "") > WINDOW]
            state = retired(state, old, life, one.session)
            near = _nearest(state, one.said.key, limits[0])
            (reply,) = yield [Asked("booster", near, one.said, day=one.day)]
            occasion = Occasion(life, one.session, one.day.isoformat(), (one.id,))
            operations = propose("booster", compile_reply(reply, one.day), occasion, near, state.seq + 1)
            valid.append(all(op.status == "applied" for op in operations))
            state = fold(operations, state)
    lists = [_nearest(state, ask.key, limits[1]) for ask in asks]
    replies = yield [Asked("utilizer", near, ask=ask) for near, ask in zip(lists, asks, strict=True)]
    profiles = tuple(Profile(near, _named(reply, near)) for near, reply in zip(lists, replies, strict=True))
    valid += [one.used is not None for one in profiles]
    return Played(tuple(state.current(*BANKS)), tuple(flagged), tuple(valid), profiles)


def _nearest(state: State, key: str, most: int) -> tuple[Entry, ...]:
    """Entries that tell of a key, then the newest; oldest first."""
    entries = state.current(*BANKS)
    near = sorted(range(len(entries)), key=lambda n: (key not in entries[n].text.split(), -n))[:most]
    return tuple(entries[n] for n in sorted(near))


def retired(state: State, old: Sequence[Entry], dialogue: str, session: str) -> State:
    """Without the entries that have left the window of working memory."""
    place = dialogue, session, "working", "DELETE"
    return fold((Operation(seq, *place, refs=(one.id,)) for seq, one in enumerate(old, state.seq + 1)), state)


def read_reply(text: str, role: str) -> Any:
    """The JSON of a chat model as filter or utilizer, as `remind run-memory` reads it; None where it cannot be."""
    try:
        return read_value(text, SCHEMAS[role])
    except NotValid:
        return None


def compile_reply(reply: str, day: date) -> str:
    """The booster's commands as the JSON of `propose`; what is none comes back as it is, and is no JSON."""
    tokens = reply.split()
    if not tokens or tokens.pop() != END:
        return reply
    starts = [n for n, token in enumerate(tokens) if token in ("ADD", "UPDATE", "DELETE")]
    if tokens and starts[:1] != [0]:
        return reply
    ops: list[dict[str, Any]] = []
    for start, end in pairwise([*starts, len(tokens)]):
        op, *rest = tokens[start:end]
        target = {} if op == "ADD" else {"target": _number(rest.pop(0) if rest else "")}
        store = rest.pop(0).lower() if rest else ""
        text = {} if op == "DELETE" and not rest else {"text": f"{day.isoformat()}: {' '.join(rest)}" if rest else ""}
        ops.append({"op": op, "store": store, **target, **text})
    return json.dumps({"ops": ops})


def _number(token: str) -> int:
    return int(token[1:]) if re.fullmatch(r"m[0-9]{1,2}", token) else 0


def _named(reply: str, shown: Sequence[Entry]) -> tuple[Entry, ...] | None:
    tokens = reply.split()
    if not tokens or tokens.pop() != END or len(set(tokens)) < len(tokens):
        return None
    numbers = [_number(token) for token in tokens]
    return tuple(shown[n - 1] for n in numbers) if all(0 < n <= len(shown) for n in numbers) else None


# what it is worth


def shares(bank: Sequence[Entry], told: Mapping[str, Told]) -> tuple[float | None, float | None]:
    """φ_f and φ_v: the share of entries that tell nothing but what was said, and of those that tell nothing at all.

    Jokes and what holds for others say nothing of the user, so that an entry of them is not faithful.
    """
    if not bank:
        return None, None
    faithful, vague = [], []
    for entry in bank:
        claims = learnt([entry.text]).claims()
        real = [one for one in map(told.__getitem__, entry.sources) if one.said.store]
        truth = [claim for one in real for claim in learnt([f"{one.day.isoformat()}: {one.said.text}"]).claims()]
        faithful.append(claims <= {*truth})
        vague.append(not claims)
    return sum(faithful) / len(bank), sum(vague) / len(bank)


class SaliMoryTask:
    """Each row is a window and its question; all roles of a rollout share one reward (Algorithm 1, line 8)."""

    def __init__(self, rows: Sequence[Any], tokenizer: Any, cfg: SaliMoryConfig) -> None:
        self.rows, self.speech, self.cfg = rows, speech_of(tokenizer), cfg

    def __len__(self) -> int:
        return len(self.rows)

    def episode(self, row: int) -> Episode:
        """Prompts of the roles in their order; returns what is `Played`."""
        window = self.rows[row]
        return spoken(rollout(window.life, [window.told], window.asks[:1], self.speech.limits), self.speech)

    def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
        """R1 + R2 + R3 of each rollout (Eq. 1-3), and the pairs of booster and utilizer (Eq. 4-5).

        No question of the world can be answered more or less personally: R1 is the accuracy.
        """
        window = self.rows[row]
        ask, turns = window.asks[0], {one.id: one for one in window.told}
        keys = {one.key for one in window.asks}
        gold = {one.id for one in window.told if one.said.store and one.said.key in keys}
        judged = []
        for one in outcomes:
            profile = one.profiles[0]
            right = float(profile.answer(ask) == ask.answer)
            judged.append(Judged(one, right, None, shares(one.bank, turns), profile.quality(ask)))
        return scores(judged, gold, self.cfg)


# the expert's replies


def expert_reply(asked: Asked, expert: Expert, random: Random) -> str:
    """What an expert replies; as a utilizer it adds an entry too many about as often as it keeps chatter."""
    turn, ask = asked.turn, asked.ask
    if asked.role == "filter" and turn:
        return YES if expert.keeps(turn, random) else NO
    if turn:
        taste = turn.key in world.ATTRIBUTES["semantic"]
        store = "PREFERENCE" if taste else "FACT"
        old = [n for n, one in enumerate(asked.entries, start=1) if f"my {turn.key} " in f"{one.text} "]
        same = [n for n in old if asked.entries[n - 1].store == store.lower()]
        command = f"UPDATE m{same[-1]}" if " now " in turn.text and same else "ADD"
        return f"{command} {store} {expert.tells(turn, random)} {END}"
    named = [ask is not None and ask.key in one.text.split() for one in asked.entries]
    if (others := [n for n, right in enumerate(named) if not right]) and random.random() < expert.kept:
        named[random.choice(others)] = True
    return " ".join([*(f"m{n}" for n, right in enumerate(named, start=1) if right), END])


def lessons(
    life: Life, expert: Expert, turns: int, seed: int = 0, limits: tuple[int, int] = (SHOWN, LISTED)
) -> Iterator[tuple[Asked, str]]:
    """What the expert is asked in all windows of a dialogue, all their questions included, and replies."""
    for number, window in enumerate(windows(life, turns)):
        answer = partial(_replies, expert, Random(f"expert {seed} {life.id} {number}"))
        ((_, traces),) = together([rollout(window.life, [window.told], window.asks, limits)], answer)
        yield from traces


def _replies(expert: Expert, random: Random, asked: Sequence[Asked]) -> list[str]:
    return [expert_reply(one, expert, random) for one in asked]
