"""MemBuilder (2601.05488, Section 3.2 and Appendix C): a core block, and episodic, semantic and procedural entries,
kept by four roles of one policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from remind.core.errors import ConfigError
from remind.data.dialogue import Session, Turn
from remind.llm.request import Request
from remind.memory.asking import failed, filled, words
from remind.memory.base import Memory, Query, Services
from remind.memory.logged import RULES, LoggedBank, Policy, about, dated, numbered, replies, salient, taken
from remind.memory.operations import Entry, Operation
from remind.memory.proposals import LONGEST, MOST, Occasion, Role, propose, schema, undated
from remind.memory.times import spans
from remind.states.pyramid import one_line, turn_text
from sae.ranges import PositiveInt, Share, check_ranges

ROLES: tuple[Role, ...] = ("core", "episodic", "semantic", "procedural")
#: A reply, the entries that its references count, and `Operation.by`.
Replied = tuple[str, list[Entry], Mapping[str, str]]
#: Tokens of a reply, and how often the policy compresses the block before it is cut.
ROOM, TRIES = 6000, 2
_ROUTINE = re.compile(
    r"\b(?:every (?:\w*day|morning|evening|night|week|month)|usually|always|routine|whenever|step \d)\b", re.I
)
_SEQUENCE = re.compile(r"\b(?:first|then|next|after that|afterwards|finally)\b", re.I)
_STATE = re.compile(
    r"\b(?:am|is|are|have|has|like|loves?|prefers?|hates?|enjoys?|lives?|works?|named|called|owns?|favou?rite)\b"
    r"|['\u2019](?:m|s|re|ve)\b",
    re.I,
)
_SELF = re.compile(
    r"\b(?:my name is|call me|I(?: am|['\u2019]m) (?:an?|from|\d+)|I (?:live|work|study)|my job)\b", re.I
)
_SENTENCE = re.compile(r"(?<=[.!?\u2026])\s+")


@dataclass(frozen=True)
class MemBuilderSystem:
    """Four stores, each kept by a role that sees the memory as it was before the session.

    UPDATE and MERGE leave the older entries where they are, so that history can be asked for; of the core block the
    last version alone is shown, before all entries.
    """

    name: str = "membuilder"
    """As the user calls it."""
    policy: Policy = "llm"
    """Who proposes operations. llm: the endpoint of memory and compress, and where there is none or it fails the rules,
    which marks the session. extractive: the rules."""
    shown: PositiveInt = 20
    """Entries of its store that a role is shown, the nearest to the session's turns."""
    block_characters: PositiveInt = 5000
    """Characters of the core block from which it is compressed."""
    compressed_characters: PositiveInt = 3000
    """Characters that a compressed block stays below; after two tries without success it is cut at a line."""
    update_at: Share = 0.85
    """Cosine from which the rules make an entry an UPDATE of the nearest one of its store."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        if self.compressed_characters > self.block_characters:
            raise ConfigError("compressed_characters must be at most block_characters")

    def about(self) -> dict[str, Any]:
        names = (*(f"membuilder_{role}" for role in ROLES), "membuilder_compress")
        return {"system": "membuilder", **asdict(self), **about(self.policy, *names)}

    def open(self, folder: str | Path, dialogue_id: str, services: Services) -> MemBuilderBank:
        return MemBuilderBank(folder, dialogue_id, self, services)


def request(
    role: Role,
    dialogue: str,
    session: Session,
    entries: Sequence[Entry],
    block_characters: int = MemBuilderSystem.block_characters,
) -> Request:
    """What a role is asked after a session.

    Args:
        entries: of its store; of core the block, if there is one.
        block_characters: as in `MemBuilderSystem`.
    """
    data = {"time": one_line(session.time or "unknown"), "session": numbered(map(turn_text, session.turns))}
    own: dict[str, Any] = {}
    if role == "core":
        data["block"] = "".join(one.text for one in entries)
        own["used"] = 100 * len(data["block"]) // block_characters
    else:
        data["entries"] = numbered(one.text for one in entries)
    return filled(dialogue, "memory", f"membuilder_{role}", data, ROOM, schema(role), **own)


class MemBuilderBank(LoggedBank):
    """The block has no sources where it is retrieved, since nobody can tell which turns a line of it is from; the log
    has those that each operation named."""

    system: MemBuilderSystem
    keeps_versions = True
    #: What the model replied after the last session, by role; a role is left out where it did not reply.
    told: Mapping[Role, Replied] = {}

    def remember(self, session: Session) -> Iterable[str]:
        occasion = Occasion(
            self.dialogue_id, session.id, dated(session.time), tuple(turn.id for turn in session.turns), RULES
        )
        told, reasons = self._ask(session) if self.system.policy == "llm" else ({}, [])
        self.told = told
        texts = {turn.id: taken(session, turn) for turn in session.turns if salient(turn)}
        operations: list[Operation] = []
        first, vectors = self.first(), dict[str, Tensor]()
        rules = _sorted(session, texts) if len(told) < len(ROLES) else {}
        if rules:
            said = [undated(text) for text in texts.values()]
            vectors = dict(zip(said, self.encoder.encode_apart(said), strict=True))
        for role in ROLES:
            if role in told:
                replied = [told[role]]
            elif role == "core":
                replied = list(self._introduced(session, rules[role]))
            else:
                replied = [
                    self._extract(role, session, rules[role][start : start + MOST[role]], texts, vectors)
                    for start in range(0, len(rules[role]), MOST[role])
                ]
            for text, entries, by in replied:
                operations += propose(role, text, replace(occasion, by=by), entries, first + len(operations))
        self.commit(operations, vectors)
        return [*reasons, *self._compress(replace(occasion, turns=()))]

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float] | Memory]:
        for block in self._block():
            if block.text:
                yield int(block.id[1:]), 1.0
        yield from self.ranker.rank(query.text, "dense")

    def _block(self) -> list[Entry]:
        return self.entries(self.store.numbers("core"))

    def _ask(self, session: Session) -> tuple[dict[Role, Replied], list[str]]:
        """By role what the model says, and why it says nothing, a line each."""
        near = list(self.encoder.encode_apart([turn_text(turn) for turn in session.turns]))
        entries = {role: self.entries(self.nearest(near, self.system.shown, role)) for role in ROLES[1:]}
        entries["core"] = self._block()
        limit = self.system.block_characters
        requests = [request(role, self.dialogue_id, session, entries[role], limit) for role in ROLES]
        answered = replies(self, "memory", requests)
        if answered is None:
            return {}, ["memory: no endpoint is named"]
        found, reasons = dict[Role, Replied](), []
        for role, (reply, by) in zip(ROLES, answered, strict=True):
            if reply.failure in (None, "invalid"):
                found[role] = (reply.text, entries[role], by)
            else:
                reasons.append(f"{failed('memory', reply)} ({role})")
        return found, reasons

    def _introduced(self, session: Session, turns: Sequence[Turn]) -> Iterator[Replied]:
        """What the rules append to the block: what speakers say they are."""
        places, block = _places(session), self._block()
        known = {line for one in block for line in one.text.splitlines()}
        lines = {line: places[turn.id] for turn in turns for line in _of_self(turn) if line not in known}
        sources = sorted(set(lines.values()))
        if lines:
            yield _reply({"op": "APPEND", "content": "\n".join(lines)[:LONGEST], "sources": sources}), block, RULES

    def _extract(
        self,
        role: Role,
        session: Session,
        turns: Sequence[Turn],
        texts: Mapping[str, str],
        vectors: Mapping[str, Tensor],
    ) -> Replied:
        """What the rules say for a role that keeps entries."""
        places = _places(session)
        numbers: list[int] = []
        ops: list[dict[str, Any]] = []
        for turn in turns:
            text = texts[turn.id]
            if like := self.like(vectors[undated(text)], self.system.update_at, role):
                numbers += [number for number in like if number not in numbers]
                op = {"op": "UPDATE", "old": numbers.index(like[0]) + 1, "new_memory": text}
            else:
                op = {"op": "ADD", "memory": text}
            ops.append({**op, "sources": [places[turn.id]]})
        return _reply(*ops), self.entries(numbers), RULES

    def _compress(self, occasion: Occasion) -> list[str]:
        """Shorten a block that is too long (Appendix C.2). Returns why a rule did what the policy should have."""
        reasons: list[str] = []
        for attempt in range(TRIES + 1):
            (block,) = self._block() or [Entry("", "core", "")]
            limit = self.system.compressed_characters if attempt else self.system.block_characters
            if len(block.text) <= limit:
                break
            text, by = _newest(block.text, self.system.compressed_characters), RULES
            if self.system.policy == "llm" and attempt < TRIES and not reasons:
                limit = self.system.compressed_characters
                request = filled(
                    self.dialogue_id, "compress", "membuilder_compress", {"block": block.text}, ROOM, limit=limit
                )
                for reply, name in replies(self, "compress", [request]) or ():
                    if reply.failure is not None:
                        reasons.append(failed("compress", reply))
                    elif shorter := words(reply):
                        # JSON may hold half a character
                        text, by = shorter.encode(errors="replace").decode(), name
            refs, place = (block.id,), (self.first(), occasion.dialogue, occasion.session, "core", "REWRITE")
            self.commit([Operation(*place, f"m{place[0]}", refs, text, occasion.time, by=by)])
        return reasons


def _sorted(session: Session, texts: Mapping[str, str]) -> dict[Role, list[Turn]]:
    """The turns that the rules keep, each for one store, and all of them for the core."""
    kept = [turn for turn in session.turns if turn.id in texts]
    found: dict[Role, list[Turn]] = {role: [] for role in ROLES}
    found["core"] = kept
    for turn in kept:
        if _ROUTINE.search(turn.text) or len({one.lower() for one in _SEQUENCE.findall(turn.text)}) > 1:
            found["procedural"].append(turn)
        elif _STATE.search(turn.text) and not any(spans(turn.text, None)):
            found["semantic"].append(turn)
        else:
            found["episodic"].append(turn)
    return found


def _of_self(turn: Turn) -> Iterator[str]:
    """Sentences in which the speaker says who they are."""
    for part in _SENTENCE.split(one_line(turn.text)):
        if _SELF.search(part) and not part.endswith("?"):
            yield f"{one_line(turn.speaker)}: {part}"


def _places(session: Session) -> dict[str, int]:
    """Numbers of turns, as prompts show them."""
    return {turn.id: number for number, turn in enumerate(session.turns, 1)}


def _reply(*ops: Mapping[str, Any]) -> str:
    return json.dumps({"ops": ops})


def _newest(block: str, limit: int) -> str:
    """The last lines of a block that together stay below the limit; of a longer line its beginning."""
    lines = block.splitlines()
    while len(lines) > 1 and len("\n".join(lines)) >= limit:
        lines = lines[1:]
    return "\n".join(lines)[: limit - 1]
