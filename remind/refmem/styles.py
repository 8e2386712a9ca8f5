"""Questions of other styles than RefMem-Bench's, from the same dialogues.

P13n (SaliMory, arXiv 2606.04120, Appendix B.1), in four steps: what the conversations tell of each speaker, the points
at which advice may be wanted, what belongs together, and questions whose answers are better for it: recommendations,
and requests that say nothing of the person.

Questions on each session, for rewards (MemBuilder, arXiv 2601.05488, Section 3.4.1 and Appendix B.2). Four endpoints
have a part: an expert writes the memory (llm.memory), a writer asks about a session and what the memory held before it
(llm.questions), and a question stays where the answerer (llm.answer) gets it right from both together and not without
them, as the judge says (llm.judge).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import Tensor

from remind.core.errors import shown as quoted
from remind.core.files import sha256_json
from remind.core.progress import ProgressBar
from remind.data.dialogue import Dialogue, Question, Session, Turn
from remind.evaluation.judge import Case, judge_answers
from remind.llm.client import Chats
from remind.llm.request import ChatModel, Message, Reply, Request, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema
from remind.memory.base import Memory, Query, Services
from remind.memory.logged import dated, numbered
from remind.memory.membuilder import ROLES, MemBuilderSystem
from remind.memory.operations import Entry
from remind.memory.readers import ChatReader
from remind.models.encoder import SentenceEncoder
from remind.perception.auxiliary import ChatLLM
from remind.refmem.config import P13nConfig, SessionConfig
from remind.refmem.items import MAX_TOKENS, ask_twice, blind_request, counted, entries
from remind.states.pyramid import one_line, turn_text
from remind.text.thoughts import without_thoughts
from remind.text.words import fillers, stems

T = TypeVar("T")
#: The prompt of each style.
TEMPLATES = {"p13n": "refmem_p13n", "session": "refmem_session"}
KINDS = ("recommendation", "implicit_personalisation")
_TEXT, _NUMBERS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
_SOME = {**_NUMBERS, "minItems": 1}
_TOLD = object_schema(speaker=_TEXT, text=_TEXT, turns=_SOME)
SCHEMAS: Mapping[str, Any] = {
    step: object_schema(**{step: {"type": "array", "items": item}})
    for step, item in {
        "signals": _TOLD,
        "points": _TOLD,
        "groups": object_schema(topic=_TEXT, points=_SOME, signals=_SOME),
        "questions": object_schema(kind={"enum": list(KINDS)}, question=_TEXT, answer=_TEXT, signals=_SOME),
    }.items()
}
#: Types with their shares.
TYPES = {"single": 0.5, "multi": 0.3, "temporal": 0.2}
_OF_A_SESSION = object_schema(
    type={"enum": list(TYPES)}, question=_TEXT, answer=_TEXT, turns=_NUMBERS, entries=_NUMBERS
)
SESSION_SCHEMA = object_schema(questions={"type": "array", "items": _OF_A_SESSION})
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


def personal_questions(
    dialogues: Sequence[Dialogue], chats: Chats, config: P13nConfig
) -> tuple[list[Question], list[dict[str, Any]], dict[str, int]]:
    """The questions of all dialogues, step after step; what is of no use is left out.

    Returns:
        The questions; rows with `step`, `sample`, `why` and `entry` (None for a whole reply) of what was rejected; and
        requests and entries by step.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    rejected: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    chat: Any = chats.stage("questions")

    def ask(step: str, tasks: Sequence[tuple[str, str]], read: Callable[[int, Mapping[str, Any]], T]) -> list[list[T]]:
        """The valid entries of the reply to each (sample, material)."""
        requests = {n: _request(step, *task, config.groups) for n, task in enumerate(tasks)}
        replies, dropped, _ = ask_twice(
            chat, requests, lambda n, reply: entries(reply, SCHEMAS[step], partial(read, n)), step
        )
        found = [replies.get(n, ([], [(None, dropped.get(n, ""))])) for n in requests]
        for (sample, _), (_, bad) in zip(tasks, found, strict=True):
            rejected.extend({"step": step, "sample": sample, "why": why, "entry": entry} for entry, why in bad)
        counts.update({f"{step}_asked": len(tasks), step: sum(len(own) for own, _ in found)})
        return [own for own, _ in found]

    talks = [(one, session) for one in dialogues for session in one.sessions if session.turns]
    said = [
        (f"{one.id} {session.id}", f"{session.time or ''}\n{numbered(map(turn_text, session.turns))}")
        for one, session in talks
    ]

    def read_told(n: int, entry: Mapping[str, Any]) -> Told:
        dialogue, session = talks[n]
        if entry["speaker"] not in dialogue.speakers:
            raise NotValid(f"{quoted(entry['speaker'])} does not speak in the conversation")
        turns = tuple(turn.id for turn in chosen("turn", entry["turns"], session.turns))
        return Told(entry["speaker"], text_of("text", entry["text"]), turns, session.time)

    # steps 1 and 2, by dialogue and speaker
    known: dict[str, dict[tuple[str, str], list[Told]]] = {"signals": {}, "points": {}}
    for step, by_person in known.items():
        for (dialogue, _), found in zip(talks, ask(step, said, read_told), strict=True):
            for one in found:
                by_person.setdefault((dialogue.id, one.speaker), []).append(one)
    people = [
        (dialogue, who, known["signals"][dialogue.id, who], known["points"][dialogue.id, who])
        for dialogue in dialogues
        for who in dialogue.speakers
        # two signals are the least that a group needs
        if len(known["signals"].get((dialogue.id, who), ())) > 1 and (dialogue.id, who) in known["points"]
    ]

    def read_group(n: int, entry: Mapping[str, Any]) -> tuple[str, list[Told]]:
        *_, signals, points = people[n]
        chosen("point", entry["points"], points)
        own = chosen("signal", entry["signals"], signals)
        if len(own) < 2:
            raise NotValid("a group needs two signals")
        return text_of("topic", entry["topic"]), own

    lists = [
        (f"{dialogue.id} {who}", f"{who}\n\nsignals\n{_listed(signals)}\n\npoints\n{_listed(points)}")
        for dialogue, who, signals, points in people
    ]
    groups = [
        (dialogue, who, topic, signals)
        for (dialogue, who, *_), found in zip(people, ask("groups", lists, read_group), strict=True)
        for topic, signals in found[: config.groups]
    ]

    def read_question(n: int, entry: Mapping[str, Any]) -> Question:
        dialogue, _, _, told = groups[n]
        text, answer = (text_of(name, entry[name]) for name in ("question", "answer"))
        signals = chosen("signal", entry["signals"], told)
        words = {*stems(text, fillers())}
        for one in signals:
            own = {*stems(one.text, fillers())} - {*stems(one.speaker, fillers())}
            if own and len(own & words) >= _TELLS * len(own):
                raise NotValid("the question gives away a signal that it should be answered from")
        turns = {turn for one in signals for turn in one.turns}
        if (most := config.episode_turns) is not None and len(turns) > most:
            raise NotValid(f"it rests on {len(turns)} turns, more than an episode has")
        evidence = tuple(sorted(turns, key=dialogue.positions.__getitem__))
        name, kind = "p13n-" + sha256_json([dialogue.id, entry["kind"], text, evidence])[:12], entry["kind"]
        when = dated(dialogue.sessions[-1].time)
        return Question(name, dialogue.id, text, answers=(answer,), evidence=evidence, category=kind, time=when)

    topics = [
        (f"{dialogue.id} {topic}", f"{who}\n\n{topic}\n\nsignals\n{_listed(signals)}")
        for dialogue, who, topic, signals in groups
    ]
    unique = {question.id: question for found in ask("questions", topics, read_question) for question in found}
    return list(unique.values()), rejected, counts


def _request(step: str, sample: str, material: str, most: int) -> Request:
    data = {"material": material}
    return from_template("questions", TEMPLATES["p13n"], sample, SCHEMAS[step], MAX_TOKENS, data, step=step, most=most)


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

    def renumbered(turn: Turn) -> Turn:
        return replace(turn, images=tuple(replace(image, index=next(index)) for image in turn.images))

    turns = [tuple(renumbered(turn) for turn in one.turns if turn.id in kept) for one in dialogue.sessions]
    sessions = (replace(one, turns=own) for one, own in zip(dialogue.sessions, turns, strict=True) if own)
    cut = Dialogue(f"{dialogue.id}/{question.id}", tuple(sessions))
    return cut, replace(question, dialogue_id=cut.id)


@dataclass(frozen=True)
class Seen:
    """A session, and the entries nearest to it that the expert held before; `lost`: what was, of what it wrote."""

    dialogue: Dialogue
    session: Session
    entries: tuple[Entry, ...]
    lost: tuple[str, ...]


def walked(dialogue: Dialogue, expert: Any, encoder: SentenceEncoder) -> Iterator[tuple[Any, Session, list[Tensor]]]:
    """MemBuilder's bank before each session, with the session and the vectors of its turns; the expert plays all roles.
    Whoever does not take the session in has it taken in on going on."""
    services = Services(encoder, lambda system, dialogue, stage: expert)
    with (
        TemporaryDirectory() as folder,
        MemBuilderSystem().open(Path(folder) / "bank", dialogue.id, services) as bank,
    ):
        for session in (one for one in dialogue.sessions if one.turns):
            yield bank, session, list(encoder.encode_apart([turn_text(turn) for turn in session.turns]))
            bank.ingest(session)


def remembered(dialogue: Dialogue, expert: ChatModel, encoder: SentenceEncoder) -> Iterator[Seen]:
    """Every session with what the expert remembers before it, and would show to a role."""
    for bank, session, near in walked(dialogue, expert, encoder):
        numbers = [*bank.store.numbers("core"), *bank.nearest(near, bank.system.shown, *ROLES[1:])]
        entries = tuple(bank.entries(numbers))
        bank.ingest(session)
        yield Seen(dialogue, session, entries, tuple(bank.lost))


def session_questions(
    dialogues: Sequence[Dialogue], chats: Chats, encoder: SentenceEncoder, config: SessionConfig
) -> tuple[list[Question], list[dict[str, Any]], dict[str, int]]:
    """Questions on every session; those that fail the check are written anew with the reason, then dropped.

    Returns:
        The questions, rows with `sample`, `why` and `entry` of what was rejected, and counts.

    Raises:
        ModelError: an endpoint as a whole cannot be used.
    """
    models = {stage: chats.stage(stage) for stage in ("memory", "questions", "answer", "judge")}
    expert, writer, answerer, judge = (model for model in models.values() if model is not None)
    sessions = sum(bool(session.turns) for one in dialogues for session in one.sessions)
    with ProgressBar("memory", len(ROLES) * sessions) as bar:
        told = counted(expert, lambda: bar.n < bar.total and bar.step())
        seen = [one for dialogue in dialogues for one in remembered(dialogue, told, encoder)]
    requests = {n: _session_request(one, config.count) for n, one in enumerate(seen)}
    want = dict.fromkeys(requests, config.count)
    kept: dict[tuple[int, str], Question] = {}
    rejected: list[dict[str, Any]] = []
    asked = 0

    def read(n: int, reply: Reply) -> tuple[str, list[Question], list[tuple[Any, str]]]:
        found, bad = entries(reply, SESSION_SCHEMA, partial(_question, seen[n]))
        return reply.text, found[: want[n]], bad

    for _ in range(config.rewrites + 1):
        found, dropped, _ = ask_twice(writer, requests, read, "questions")
        asked += len(requests)
        rejected += [_row(seen[n], why) for n, why in dropped.items()]
        drafts = [(n, one) for n, (_, own, _) in found.items() for one in own]
        failed: dict[int, list[str]] = {}
        problems = _check([(seen[n], one) for n, one in drafts], answerer, judge)
        wrong = [(n, quoted(entry), entry, why) for n, (*_, bad) in found.items() for entry, why in bad]
        for (n, one), why in zip(drafts, problems, strict=True):
            if why:
                wrong.append((n, one.text, {"question": one.text, "answer": one.answers[0]}, why))
            else:
                kept[n, one.id] = one
        for n, text, entry, why in wrong:
            failed.setdefault(n, []).append(f"{text} - {why}")
            rejected.append(_row(seen[n], why, entry))
        want = {n: len(reasons) for n, reasons in failed.items()}
        requests = {n: _again(requests[n], found[n][0], reasons) for n, reasons in failed.items()}
    questions = [kept[place] for place in sorted(kept, key=lambda place: place[0])]
    made = {"sessions": len(seen), "lost": sum(bool(one.lost) for one in seen), "requests": asked}
    return questions, rejected, {**made, "questions": len(questions), "rejected": len(rejected)}


def types(count: int) -> dict[str, int]:
    """How many questions of each type, by largest remainder; of equal ones the first."""
    whole = {name: int(share * count) for name, share in TYPES.items()}
    rest = sorted(TYPES, key=lambda name: round(whole[name] - TYPES[name] * count, 9))
    return {name: whole[name] + (name in rest[: count - sum(whole.values())]) for name in TYPES}


def _session_request(seen: Seen, count: int) -> Request:
    data = {"time": one_line(seen.session.time or "unknown")}
    data["session"] = numbered(turn_text(turn) for turn in seen.session.turns)
    data["entries"] = numbered(one.text for one in seen.entries)
    ask = ", ".join(f"{number} {name}" for name, number in types(count).items())
    about = "questions", TEMPLATES["session"], f"{seen.dialogue.id} {seen.session.id}"
    return from_template(*about, SESSION_SCHEMA, MAX_TOKENS, data, count=count, types=ask)


def _again(request: Request, text: str, reasons: Sequence[str]) -> Request:
    """The request for others in place of questions that fail the check."""
    listed = numbered(reasons)
    code = code_for([listed])
    say = (
        f"{len(reasons)} of these cannot be used. Write exactly {len(reasons)} others of the same types in their place."
    )
    more = (Message("assistant", text), Message("user", f"{say}\n\n{fenced('reasons', listed, code)}"))
    return replace(request, messages=(*request.messages, *more))


def _question(seen: Seen, row: Mapping[str, Any]) -> Question:
    """A question of a reply. Raises NotValid."""
    text, answer = (text_of(name, row[name]) for name in ("question", "answer"))
    if not row["turns"] or (row["type"] == "multi" and not row["entries"]):
        raise NotValid(f"a question of type {row['type']} without {'entries' if row['turns'] else 'turns'}")
    turns = {turn.id for turn in chosen("turn", row["turns"], seen.session.turns)}
    turns |= {turn for one in chosen("entry", row["entries"], seen.entries) for turn in one.sources}
    name = "sq-" + sha256_json([seen.dialogue.id, seen.session.id, text])[:12]
    evidence = tuple(sorted(turns, key=seen.dialogue.positions.__getitem__))
    asked = Question(name, seen.dialogue.id, text, answers=(answer,), evidence=evidence)
    return replace(asked, category=row["type"], time=dated(seen.session.time))


def _check(drafts: Sequence[tuple[Seen, Question]], answerer: ChatModel, judge: ChatModel) -> list[str]:
    """Why each question is of no use; "" where it is."""
    contexts = []
    for seen, _ in drafts:
        made = [(turn.id, turn_text(turn), turn.time or seen.session.time) for turn in seen.session.turns]
        made += [(one.id, one.text, one.time) for one in seen.entries]
        contexts.append([Memory(name, text, "shown", (), time, 0.0, 0) for name, text, time in made])
    queries = [Query.of(one) for _, one in drafts]
    with ProgressBar("answers", 2 * len(drafts)) as bar:
        told = counted(answerer, bar.step)
        informed = ChatReader("direct").read_all(list(zip(queries, contexts, strict=True)), lambda stage: told)
        guesses = told.complete([blind_request(one) for _, one in drafts])
    # what has not the form that was asked for may still be a guess
    bare = [without_thoughts(one.text).strip() for one in guesses]
    blind = [
        str((one.value["answers"] or [""])[0]) if one.failure is None else text
        for one, text in zip(guesses, bare, strict=True)
    ]
    said = [text for both in zip((one.text for one in informed), blind, strict=True) for text in both]
    twice = [one for _, one in drafts for _ in range(2)]
    cases = [Case(one.text, one.answers, text) for one, text in zip(twice, said, strict=True)]
    rulings = judge_answers(ChatLLM({"judge": judge}), cases, samples=[one.id for one in twice])
    reasons = []
    for reading, guess, text, right, guessed in zip(informed, guesses, bare, rulings[::2], rulings[1::2], strict=True):
        lost = None if guess.failure == "invalid" and text else guess.failure
        if reading.failure is not None or lost is not None or right.value is None or guessed.value is None:
            why = reading.failure or (lost and guess.message) or right.message or guessed.message
            reasons.append(f"it could not be checked: {why}")
        elif guessed.value:
            reasons.append("it is answered right without the conversation")
        else:
            reasons.append("" if right.value else "it is not answered right from session and entries")
    return reasons


def _row(seen: Seen, why: str, entry: Any = None) -> dict[str, Any]:
    return {"sample": f"{seen.dialogue.id} {seen.session.id}", "why": why, "entry": entry}
