"""SaliMory's task on one's own dialogues, with chat models behind endpoints (arXiv 2606.04120, Algorithm 1, App. E).

An episode is a question and at most `salimory.turns` turns around its evidence. The roles get the requests of `remind
run-memory`, `llm.answer` replies from the utilizer's profile, and `llm.judge` grades the reply (E.1), every entry of
the memory (E.2) and the profile (E.3). An expert, `llm.memory`, plays the roles for SFT.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import nan
from typing import Any

from remind.core.progress import track
from remind.data.dialogue import Dialogue, Question, Session
from remind.llm.request import Request, code_for, fenced, from_template
from remind.llm.structured import NotValid, object_schema, read_value
from remind.memory.asking import asked
from remind.memory.base import Memory, Query
from remind.memory.logged import dated, numbered
from remind.memory.operations import Entry, Operation, State, fold
from remind.memory.proposals import BANKS, Occasion, propose
from remind.memory.readers import ChatReader
from remind.memory.salimory import SCHEMAS, SaliMorySystem, listed, request, shown
from remind.memory.times import day_of
from remind.memory_training.config import SaliMoryConfig
from remind.memory_training.dialogues import Asked, Source
from remind.memory_training.episodes import Episode, Scores
from remind.memory_training.evaluate import together
from remind.memory_training.salimory_scores import Judged, scores
from remind.memory_training.speech import speech_of, spoken
from remind.refmem.styles import episode
from remind.states.pyramid import turn_text

TEMPLATE = "reward_salimory"
#: Tokens of a judge's reply; models that think first need some of it.
ROOM = 2048
_GRADE, _TRUTH = {"type": "number", "minimum": 0, "maximum": 1}, {"type": "boolean"}
#: Of the judge's replies, by what is graded.
GRADES: Mapping[str, Mapping[str, Any]] = {
    "response": object_schema(accuracy=_GRADE, personalisation={"anyOf": [_GRADE, {"type": "null"}]}),
    "memory": object_schema(entries={"type": "array", "items": object_schema(factual=_TRUTH, vague=_TRUTH)}),
    "profile": object_schema(score=_GRADE),
}
_FORMS = {
    "response": {"accuracy": 0.7, "personalisation": None},
    "memory": {"entries": [{"factual": True, "vague": False}]},
    "profile": {"score": 0.7},
}


@dataclass(frozen=True)
class Played:
    """What the roles made of an episode.

    Attributes:
        bank: the entries at the end.
        flagged: ids of the turns that the filter let through.
        profile: what the utilizer wrote; "": nothing, or nothing that can be read.
        valid: of every reply, whether it could be read and applied.
    """

    bank: tuple[Entry, ...]
    flagged: tuple[str, ...]
    profile: str
    valid: tuple[bool, ...]


def play(dialogue: Dialogue, question: Question) -> Generator[list[Asked], list[str], Played]:
    """The roles go through a dialogue with an empty memory, then write a profile for a question, as `SaliMoryBank`."""
    state, flagged, valid = State(), list[str](), list[bool]()
    numbers = {session.id: n for n, session in enumerate(dialogue.sessions)}

    def aged(entry: Entry, time: str | None, session: Session | None = None) -> bool:
        now, said = day_of(time), day_of(entry.time)
        if now is not None and said is not None:
            return now - said > timedelta(SaliMorySystem.window_days)
        return session is not None and numbers[session.id] - numbers[entry.session] >= SaliMorySystem.window_sessions

    for session in dialogue.sessions:
        old = [one for one in state.current("working") if aged(one, session.time, session)]
        gone = (
            Operation(seq, dialogue.id, session.id, "working", "DELETE", refs=(one.id,))
            for seq, one in enumerate(old, state.seq + 1)
        )
        state = fold(gone, state)
        verdicts = yield [
            Asked("filter", request("filter", dialogue.id, shown(session, turn))) for turn in session.turns
        ]
        read = [_read(reply, SCHEMAS["filter"]) for reply in verdicts]
        valid += [verdict is not None for verdict in read]
        for turn in (turn for turn, verdict in zip(session.turns, read, strict=True) if verdict and verdict["salient"]):
            flagged.append(turn.id)
            entries = _listed(state)
            data = {**shown(session, turn), "entries": listed((one.store, one.text) for one in entries)}
            (written,) = yield [Asked("booster", request("booster", dialogue.id, data))]
            place = Occasion(dialogue.id, session.id, dated(turn.time or session.time), (turn.id,))
            operations = propose("booster", written, place, entries, state.seq + 1)
            valid.append(all(one.status == "applied" for one in operations))
            state = fold(operations, state)
    entries = [one for one in _listed(state) if not (one.store == "working" and aged(one, question.time))]
    profile = ""
    if entries:
        data = {
            "entries": listed((one.store, one.text) for one in entries),
            "question": asked(Query.of(question)),
        }
        (written,) = yield [Asked("utilizer", request("utilizer", dialogue.id, data))]
        value = _read(written, SCHEMAS["utilizer"])
        valid.append(value is not None)
        profile = value["profile"].strip() if value else ""
    return Played(tuple(state.current(*BANKS)), tuple(flagged), profile, tuple(valid))


def _listed(state: State) -> list[Entry]:
    """What booster and utilizer are shown: an episode is too short for more."""
    return state.current(*BANKS)[-SaliMorySystem.whole :]


def _read(reply: str, schema: Mapping[str, Any]) -> Any:
    try:
        return read_value(reply, schema)
    except NotValid:
        return None


def imitated(source: Source, turns: int) -> Iterator[tuple[Asked, str]]:
    """What an expert is asked in all episodes, and its replies that could be read and applied."""
    expert, found = source.models["memory"], list[tuple[Asked, str]]()

    def answer(steps: Sequence[Asked]) -> list[str]:
        replies = expert.complete([one.request() for one in steps])
        texts = [one.text if one.failure in (None, "invalid") else "" for one in replies]
        found.extend(zip(steps, texts, strict=True))
        return texts

    for pair in track(episodes(source, turns), "expert", len(source.questions)):
        found.clear()
        (played,) = together([play(*pair)], answer)
        yield from (one for one, valid in zip(found, played.valid, strict=True) if valid)


def episodes(source: Source, turns: int) -> list[tuple[Dialogue, Question]]:
    """A dialogue of its own for each question."""
    dialogues = {one.id: one for one in source.dialogues}
    return [episode(dialogues[one.dialogue_id], one, turns) for one in source.questions]


class SaliMoryDialoguesTask:
    """Each row is an episode; all roles of a rollout share one reward (Algorithm 1, line 8)."""

    def __init__(self, source: Source, tokenizer: Any, cfg: SaliMoryConfig) -> None:
        self.rows, self.speech, self.cfg = episodes(source, cfg.turns), speech_of(tokenizer), cfg
        self.answerer, self.judge = source.models["answer"], source.models["judge"]

    def __len__(self) -> int:
        return len(self.rows)

    def episode(self, row: int) -> Episode:
        """Prompts of the roles in their order; returns what is `Played`."""
        return spoken(play(*self.rows[row]), self.speech)

    def score(self, row: int, outcomes: Sequence[Any]) -> Scores:
        """The replies of the answerer go out together, then all that the judge grades; without a grade a reward is NaN.

        An empty profile is worth nothing, and an empty memory is not graded, see `memory_reward`.
        """
        dialogue, question = self.rows[row]
        query = Query.of(question)
        profiles = [Memory("profile", one.profile, "profile", None, None, 1.0, 0) for one in outcomes]
        told = [[one] if one.text else [] for one in profiles]
        readings = ChatReader("direct").read_all([(query, memories) for memories in told], lambda stage: self.answerer)
        requests: dict[tuple[int, str], Request] = {}
        for n, (one, reading) in enumerate(zip(outcomes, readings, strict=True)):
            entries = listed((entry.store, entry.text) for entry in one.bank)
            gold = numbered(question.answers)
            if reading.text:
                given = {"question": query.text, "right": gold, "reply": reading.text, "memory": entries}
                requests[n, "response"] = _graded("response", question.id, given)
            if one.bank:
                said = "\n".join(turn_text(turn) for turn in dialogue.turns)
                requests[n, "memory"] = _graded("memory", question.id, {"conversation": said, "memory": entries})
            if one.profile:
                given = {"question": query.text, "right": gold, "profile": one.profile, "memory": entries}
                requests[n, "profile"] = _graded("profile", question.id, given)
        replies = self.judge.complete(list(requests.values()))
        grades = {
            place: None if reply.failure is not None else reply.value
            for place, reply in zip(requests, replies, strict=True)
        }
        judged = []
        for n, (one, reading) in enumerate(zip(outcomes, readings, strict=True)):
            response = grades.get((n, "response"), {"accuracy": 0.0 if reading.failure is None else nan})
            profile = grades.get((n, "profile"), {"score": 0.0})
            judged.append(
                Judged(
                    accuracy=response["accuracy"] if response else nan,
                    personalisation=(response or {}).get("personalisation"),
                    shares=_shares(grades.get((n, "memory")), one.bank),
                    profile=profile["score"] if profile else nan,
                    flagged=one.flagged,
                    bank=one.bank,
                    valid=sum(one.valid) / len(one.valid),
                )
            )
        return scores(judged, set(question.evidence), self.cfg)


def _shares(grade: Any, bank: Sequence[Entry]) -> tuple[float | None, float | None]:
    """φ_f and φ_v, as `shares` of the memory world; NaN where the judge did not grade every entry."""
    if not bank:
        return None, None
    entries = grade["entries"] if grade else []
    if len(entries) != len(bank):
        return nan, nan
    return tuple(sum(one[name] for one in entries) / len(bank) for name in ("factual", "vague"))  # type: ignore[return-value]


def _graded(step: str, sample: str, given: Mapping[str, str]) -> Request:
    code = code_for(list(given.values()))
    return from_template(
        "judge",
        TEMPLATE,
        sample,
        GRADES[step],
        ROOM,
        step=step,
        form=json.dumps(_FORMS[step]),
        code=code,
        parts=[fenced(name, text, code) for name, text in given.items()],
    )
