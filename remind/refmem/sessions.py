"""Questions on each session of a dialogue, for rewards (MemBuilder, arXiv 2601.05488, Section 3.4.1 and Appendix B.2).

Four endpoints have a part: an expert writes the memory (llm.memory), a writer asks about a session and what the memory
held before it (llm.questions), and a question stays where the answerer (llm.answer) gets it right from both together
and not without them, as the judge says (llm.judge).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from remind.core.files import sha256_json
from remind.data.dialogue import Dialogue, Question, Session
from remind.evaluation.judge import Case, judge_answers
from remind.llm.auxiliary import ChatLLM
from remind.llm.client import Chats
from remind.llm.request import ChatModel, Message, Reply, Request, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema
from remind.memory.base import Memory, Query, Services
from remind.memory.logged import numbered
from remind.memory.membuilder import ROLES, MemBuilderSystem
from remind.memory.operations import Entry
from remind.memory.readers import ChatReader
from remind.models.encoder import SentenceEncoder
from remind.refmem.config import SessionConfig
from remind.refmem.filters import blind_request
from remind.refmem.generate import MAX_TOKENS, ask_twice
from remind.refmem.personal import chosen, text_of
from remind.states.pyramid import one_line, turn_text
from remind.text.days import day_of

TEMPLATE = "refmem_session"
#: Types with their shares.
TYPES = {"single": 0.5, "multi": 0.3, "temporal": 0.2}
_TEXT, _NUMBERS = {"type": "string"}, {"type": "array", "items": {"type": "integer"}}
_QUESTION = object_schema(type={"enum": list(TYPES)}, question=_TEXT, answer=_TEXT, turns=_NUMBERS, entries=_NUMBERS)
SCHEMA = object_schema(questions={"type": "array", "items": _QUESTION})


@dataclass(frozen=True)
class Seen:
    """A session, and the entries nearest to it that the expert's memory held before; `degraded`: why rules wrote it."""

    dialogue: Dialogue
    session: Session
    entries: tuple[Entry, ...]
    degraded: tuple[str, ...]


def remembered(
    dialogue: Dialogue, expert: ChatModel, encoder: SentenceEncoder, config: SessionConfig
) -> Iterator[Seen]:
    """Every session with what MemBuilder, played by the expert, remembers before it."""
    services = Services(encoder, lambda system, dialogue, stage: expert)
    with (
        TemporaryDirectory() as folder,
        MemBuilderSystem().open(Path(folder) / "bank", dialogue.id, services) as bank,
    ):
        for session in (one for one in dialogue.sessions if one.turns):
            near = list(encoder.encode_apart([turn_text(turn) for turn in session.turns]))
            numbers = [*bank.store.numbers("core"), *bank.nearest(near, config.shown, *ROLES[1:])]
            entries = tuple(bank.entries(numbers))
            yield Seen(dialogue, session, entries, bank.ingest(session).degraded)


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
    seen = [one for dialogue in dialogues for one in remembered(dialogue, expert, encoder, config)]
    requests = {n: _request(one, config.count) for n, one in enumerate(seen)}
    want = dict.fromkeys(requests, config.count)
    kept: dict[int, dict[str, Question]] = {n: {} for n in requests}
    rejected: list[dict[str, Any]] = []
    asked = rounds = 0
    while requests and rounds <= config.rewrites:
        order = sorted(requests)
        read = partial(_read, [seen[n] for n in order], [want[n] for n in order])
        found, dropped, _ = ask_twice(writer, [requests[n] for n in order], read, "questions")
        asked, rounds = asked + len(order), rounds + 1
        rejected += [_row(seen[order[place]], why) for place, why in sorted(dropped.items())]
        drafts = [(order[place], one) for place, (_, own) in sorted(found.items()) for one in own]
        failed: dict[int, list[str]] = {}
        problems = _check([(seen[n], one) for n, one in drafts], answerer, judge)
        for (n, one), why in zip(drafts, problems, strict=True):
            if why:
                failed.setdefault(n, []).append(f"{one.text} - {why}")
                rejected.append(_row(seen[n], why, {"question": one.text, "answer": one.answers[0]}))
            else:
                kept[n][one.id] = one
        want = {n: len(reasons) for n, reasons in failed.items()}
        said = {order[place]: text for place, (text, _) in found.items()}
        requests = {n: _again(requests[n], said[n], reasons) for n, reasons in failed.items()}
    questions = [one for own in kept.values() for one in own.values()]
    counts = {"sessions": len(seen), "by_rule": sum(bool(one.degraded) for one in seen), "requests": asked}
    return questions, rejected, {**counts, "questions": len(questions), "rejected": len(rejected)}


def types(count: int) -> dict[str, int]:
    """How many questions of each type, by largest remainder; of equal ones the first."""
    whole = {name: int(share * count) for name, share in TYPES.items()}
    rest = sorted(TYPES, key=lambda name: round(whole[name] - TYPES[name] * count, 9))
    return {name: whole[name] + (name in rest[: count - sum(whole.values())]) for name in TYPES}


def _request(seen: Seen, count: int) -> Request:
    time = one_line(seen.session.time or "unknown")
    session = numbered(turn_text(turn) for turn in seen.session.turns)
    entries = numbered(one.text for one in seen.entries)
    code = code_for([time, session, entries])
    return from_template(
        "questions",
        TEMPLATE,
        f"{seen.dialogue.id} {seen.session.id}",
        SCHEMA,
        MAX_TOKENS,
        count=count,
        types=", ".join(f"{number} {name}" for name, number in types(count).items()),
        code=code,
        time=fenced("time", time, code),
        session=fenced("session", session, code),
        entries=fenced("entries", entries, code) if entries else "The memory has no entries yet.",
    )


def _again(request: Request, text: str, reasons: Sequence[str]) -> Request:
    """The request for others in place of questions that fail the check."""
    listed = numbered(reasons)
    code = code_for([listed])
    say = (
        f"{len(reasons)} of these cannot be used. Write exactly {len(reasons)} others of the same types in their place."
    )
    more = (Message("assistant", text), Message("user", f"{say}\n\n{fenced('reasons', listed, code)}"))
    return replace(request, messages=(*request.messages, *more))


def _read(sessions: Sequence[Seen], counts: Sequence[int], place: int, reply: Reply) -> tuple[str, list[Question]]:
    """A reply and its questions. Raises NotValid unless all are valid, and as many as were asked for."""
    seen, count = sessions[place], counts[place]
    if reply.failure is not None:
        raise NotValid(reply.message or reply.failure)
    rows = reply.value["questions"]
    if len(rows) != count:
        raise NotValid(f"{len(rows)} questions, not {count}")
    questions, positions = [], seen.dialogue.positions
    for row in rows:
        text, answer = (text_of(name, row[name]) for name in ("question", "answer"))
        if not row["turns"] or (row["type"] == "multi" and not row["entries"]):
            raise NotValid(f"a question of type {row['type']} without {'entries' if row['turns'] else 'turns'}")
        turns = {turn.id for turn in chosen("turn", row["turns"], seen.session.turns)}
        turns |= {turn for one in chosen("entry", row["entries"], seen.entries) for turn in one.sources}
        when = seen.session.time if day_of(seen.session.time) else None
        name = "sq-" + sha256_json([seen.dialogue.id, seen.session.id, text])[:12]
        evidence = tuple(sorted(turns, key=positions.__getitem__))
        asked = Question(name, seen.dialogue.id, text, answers=(answer,), evidence=evidence)
        questions.append(replace(asked, category=row["type"], time=when))
    return reply.text, questions


def _check(drafts: Sequence[tuple[Seen, Question]], answerer: ChatModel, judge: ChatModel) -> list[str]:
    """Why each question is of no use; "" where it is."""
    if not drafts:
        return []
    queries = [Query.of(one) for _, one in drafts]
    contexts = [_context(seen) for seen, _ in drafts]
    informed = ChatReader("direct").read_all(list(zip(queries, contexts, strict=True)), lambda stage: answerer)
    guesses = answerer.complete([blind_request(one) for _, one in drafts])
    blind = [str((one.value["answers"] or [""])[0]) if one.failure is None else "" for one in guesses]
    cases = [
        Case(one.text, one.answers, said)
        for (_, one), *both in zip(drafts, (reading.text for reading in informed), blind, strict=True)
        for said in both
    ]
    samples = [one.id for _, one in drafts for _ in range(2)]
    rulings = iter(judge_answers(ChatLLM({"judge": judge}), cases, samples=samples))
    reasons = []
    for reading in informed:
        right, guessed = next(rulings), next(rulings)
        if reading.failure is not None or right.value is None or guessed.value is None:
            why = reading.failure or right.message or guessed.message
            reasons.append(f"it could not be checked: {why}")
        elif guessed.value:
            reasons.append("it is answered right without the conversation")
        else:
            reasons.append("" if right.value else "it is not answered right from session and entries")
    return reasons


def _context(seen: Seen) -> list[Memory]:
    """Session and entries as memories."""
    made = [(turn.id, turn_text(turn), turn.time or seen.session.time) for turn in seen.session.turns]
    made += [(one.id, one.text, one.time) for one in seen.entries]
    return [Memory(name, text, "shown", (), time, 0.0, 0) for name, text, time in made]


def _row(seen: Seen, why: str, entry: Any = None) -> dict[str, Any]:
    return {"sample": f"{seen.dialogue.id} {seen.session.id}", "why": why, "entry": entry}
