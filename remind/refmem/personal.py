"""P13n-style questions in four steps (SaliMory, arXiv 2606.04120, Appendix B.1), and episodes to train on them.

What the conversations tell of each speaker, the points at which advice may be wanted, what belongs together, and
questions whose answers are better for it: recommendations, and requests that say nothing of the person.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from remind.core.errors import shown as quoted
from remind.core.files import sha256_json
from remind.data.dialogue import Corpus, Dialogue, Question, Session
from remind.llm.request import ChatModel, Reply, Request, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema
from remind.memory.logged import numbered
from remind.refmem.config import P13nConfig
from remind.refmem.generate import MAX_TOKENS, ask_twice
from remind.states.pyramid import one_line, turn_text
from remind.text.days import day_of
from remind.text.words import fillers, stems

T = TypeVar("T")
TEMPLATE = "refmem_p13n"
KINDS = ("recommendation", "implicit_personalisation")
_TEXT, _NUMBERS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_TOLD = object_schema(speaker=_TEXT, text=_TEXT, turns=_NUMBERS)
SCHEMAS: Mapping[str, Any] = {
    step: object_schema(**{step: {"type": "array", "items": item}})
    for step, item in {
        "signals": _TOLD,
        "points": _TOLD,
        "groups": object_schema(topic=_TEXT, points=_NUMBERS, signals=_NUMBERS),
        "questions": object_schema(kind={"enum": list(KINDS)}, question=_TEXT, answer=_TEXT, signals=_NUMBERS),
    }.items()
}
#: Characters of a text of a reply.
LONGEST = 2000
#: Share of a signal's words from which a question is taken to tell it.
_TELLS = 0.6


@dataclass(frozen=True)
class Told:
    """A signal or a point: what a session tells of a speaker, and by which turns."""

    speaker: str
    text: str
    turns: tuple[str, ...]
    time: str | None


@dataclass(frozen=True)
class Group:
    """What belongs together of a speaker."""

    speaker: str
    topic: str
    signals: tuple[Told, ...]


class Writer:
    """Asks step after step; what is of no use is left out and kept as a row with the reason.

    Attributes:
        rejected: `step`, `sample`, `why`, and `entry`, or None for a whole reply.
        counts: requests and entries by step.
    """

    def __init__(self, chat: ChatModel, config: P13nConfig) -> None:
        self.chat, self.config = chat, config
        self.rejected: list[dict[str, Any]] = []
        self.counts: dict[str, int] = {}

    def questions(self, dialogues: Sequence[Dialogue]) -> list[Question]:
        """The questions of all dialogues. Raises ModelError where the endpoint as a whole cannot be used."""
        sessions = [(one, session) for one in dialogues for session in one.sessions if session.turns]
        told = {step: self._told(step, sessions) for step in ("signals", "points")}
        people = [(one, speaker) for one in dialogues for speaker in one.speakers]
        known = {
            step: [[one for one in found.get(dialogue.id, ()) if one.speaker == who] for dialogue, who in people]
            for step, found in told.items()
        }
        # two signals are the least that a group needs
        places = [n for n in range(len(people)) if len(known["signals"][n]) > 1 and known["points"][n]]
        groups = self._groups([(*people[n], known["signals"][n], known["points"][n]) for n in places])
        return self._composed(groups)

    def _told(self, step: str, sessions: Sequence[tuple[Dialogue, Session]]) -> dict[str, list[Told]]:
        """Steps 1 and 2, by dialogue."""
        tasks = [
            (f"{dialogue.id} {one.id}", f"{one.time or ''}\n{numbered(map(turn_text, one.turns))}")
            for dialogue, one in sessions
        ]

        def read(n: int, entry: Mapping[str, Any]) -> Told:
            dialogue, session = sessions[n]
            if entry["speaker"] not in dialogue.speakers:
                raise NotValid(f"{quoted(entry['speaker'])} does not speak in the conversation")
            turns = tuple(turn.id for turn in chosen("turn", entry["turns"], session.turns))
            return Told(entry["speaker"], text_of("text", entry["text"]), turns, session.time)

        found: dict[str, list[Told]] = {}
        for n, entries in self._ask(step, tasks, read).items():
            found.setdefault(sessions[n][0].id, []).extend(entries)
        return found

    def _groups(
        self, people: Sequence[tuple[Dialogue, str, Sequence[Told], Sequence[Told]]]
    ) -> list[tuple[Dialogue, Group]]:
        """Step 3."""
        tasks = [
            (f"{dialogue.id} {who}", f"{who}\n\nsignals\n{_listed(signals)}\n\npoints\n{_listed(points)}")
            for dialogue, who, signals, points in people
        ]

        def read(n: int, entry: Mapping[str, Any]) -> Group:
            _, who, signals, points = people[n]
            chosen("point", entry["points"], points)
            own = chosen("signal", entry["signals"], signals)
            if len(own) < 2:
                raise NotValid("a group needs two signals")
            return Group(who, text_of("topic", entry["topic"]), tuple(own))

        found = self._ask("groups", tasks, read)
        return [(people[n][0], group) for n, groups in found.items() for group in groups[: self.config.groups]]

    def _composed(self, groups: Sequence[tuple[Dialogue, Group]]) -> list[Question]:
        """Step 4."""
        tasks = [
            (f"{dialogue.id} {one.topic}", f"{one.speaker}\n\n{one.topic}\n\nsignals\n{_listed(one.signals)}")
            for dialogue, one in groups
        ]

        def read(n: int, entry: Mapping[str, Any]) -> Question:
            dialogue, group = groups[n]
            text, answer = (text_of(name, entry[name]) for name in ("question", "answer"))
            signals = chosen("signal", entry["signals"], group.signals)
            words = {*stems(text, fillers())}
            for one in signals:
                own = {*stems(one.text, fillers())} - {*stems(one.speaker, fillers())}
                if own and len(own & words) >= _TELLS * len(own):
                    raise NotValid("the question gives away a signal that it should be answered from")
            turns = {turn for one in signals for turn in one.turns}
            if (most := self.config.episode_turns) is not None and len(turns) > most:
                raise NotValid(f"it rests on {len(turns)} turns, more than an episode has")
            evidence = tuple(sorted(turns, key=dialogue.positions.__getitem__))
            name = "p13n-" + sha256_json([dialogue.id, entry["kind"], text, evidence])[:12]
            last = dialogue.sessions[-1].time
            when = last if day_of(last) else None
            return Question(
                name, dialogue.id, text, answers=(answer,), evidence=evidence, category=entry["kind"], time=when
            )

        found = self._ask("questions", tasks, read)
        unique = {question.id: question for questions in found.values() for question in questions}
        return list(unique.values())

    def _ask(
        self, step: str, tasks: Sequence[tuple[str, str]], read: Callable[[int, Mapping[str, Any]], T]
    ) -> dict[int, list[T]]:
        """The valid entries of the replies to (sample, material)."""
        reasons: dict[int, list[tuple[Any, str]]] = {}

        def entries(n: int, reply: Reply) -> list[T]:
            if reply.failure is not None:
                raise NotValid(reply.message or reply.failure)
            found, reasons[n] = list[T](), []
            for entry in reply.value[step]:
                try:
                    found.append(read(n, entry))
                except NotValid as error:
                    reasons[n].append((entry, str(error)))
            if reasons[n] and not found:
                raise NotValid(reasons[n][0][1])
            return found

        requests = [self._request(step, *task) for task in tasks]
        found, dropped, _ = ask_twice(self.chat, requests, entries, step)
        for n, (sample, _) in enumerate(tasks):
            whole = [(None, dropped[n])] if n in dropped and not reasons.get(n) else []
            for entry, why in [*reasons.get(n, ()), *whole]:
                self.rejected.append({"step": step, "sample": sample, "why": why, "entry": entry})
        self.counts |= {f"{step}_asked": len(tasks), step: sum(map(len, found.values()))}
        return dict(sorted(found.items()))

    def _request(self, step: str, sample: str, material: str) -> Request:
        code, most = code_for([material]), self.config.groups
        shown = {"step": step, "most": most, "code": code, "material": fenced("material", material, code)}
        return from_template("questions", TEMPLATE, sample, SCHEMAS[step], MAX_TOKENS, **shown)


def text_of(name: str, value: str) -> str:
    """A text of a reply on one line. Raises NotValid where it is blank or too long."""
    line = one_line(value)
    if not line or len(line) > LONGEST:
        raise NotValid(f"{name} has {len(line)} characters; 1 to {LONGEST} are allowed")
    return line


def chosen(what: str, numbers: Sequence[int], items: Sequence[T]) -> list[T]:
    """The items that a reply names by number, from 1, each once. Raises NotValid where there is no such item."""
    if outside := [number for number in numbers if not 1 <= number <= len(items)]:
        raise NotValid(f"there is no {what} {quoted(outside[0])}; {len(items)} are shown")
    return [items[number - 1] for number in dict.fromkeys(numbers)]


def _listed(told: Sequence[Told]) -> str:
    return numbered(f"[{one.time}] {one.text}" if one.time else one.text for one in told)


def episode(dialogue: Dialogue, question: Question, most: int) -> tuple[Dialogue, Question]:
    """At most so many turns of a dialogue, those of the evidence and the nearest to them, and the question about them.

    Its turns keep their ids, its images are counted anew.
    """
    gold = [dialogue.positions[turn] for turn in question.evidence]
    near = sorted(range(len(dialogue.turns)), key=lambda n: (min(abs(n - place) for place in gold), n))
    kept = {dialogue.turns[n].id for n in near[:most]}
    index = count()
    sessions = [
        replace(
            session,
            turns=tuple(
                replace(turn, images=tuple(replace(image, index=next(index)) for image in turn.images))
                for turn in session.turns
                if turn.id in kept
            ),
        )
        for session in dialogue.sessions
    ]
    cut = Dialogue(f"{dialogue.id}/{question.id}", tuple(session for session in sessions if session.turns))
    return cut, replace(question, dialogue_id=cut.id)


def episodes(corpus: Corpus, most: int) -> Corpus:
    """A dialogue for each question, as `episode`."""
    cut = [episode(corpus.dialogue(one.dialogue_id), one, most) for one in corpus.questions]
    return Corpus(tuple(dialogue for dialogue, _ in cut), tuple(question for _, question in cut))
