"""MemBuilder (2601.05488, Section 3.2 and Appendix C): a core block, and episodic, semantic and procedural entries,
kept by four roles of one policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from remind.data.dialogue import Session
from remind.llm.request import Request, from_template
from remind.memory.base import Memory, Query, System, words
from remind.memory.logged import NOT_AS_PUBLISHED, LoggedBank, dated, numbered
from remind.memory.operations import Entry, Occasion, Operation, Role, schema
from remind.states.pyramid import one_line, turn_text
from sae.ranges import PositiveInt

ROLES: tuple[Role, ...] = ("core", "episodic", "semantic", "procedural")
#: Tokens of a reply, and how often the policy compresses the block before it is cut.
ROOM, TRIES = 6000, 2


@dataclass(frozen=True)
class MemBuilderSystem(System):
    """Four stores, each kept by a role that sees the memory as it was before the session.

    UPDATE and MERGE leave the older entries where they are, so that history can be asked for; of the core block the
    last version alone is shown, before all entries.
    """

    templates = (*(f"membuilder_{role}" for role in ROLES), "membuilder_compress")
    rules = "the paper, Appendix C"
    not_as_published = NOT_AS_PUBLISHED
    name: str = "membuilder"
    shown: PositiveInt = 20
    """Entries of its store that a role is shown, the nearest to the session's turns."""
    block_characters: PositiveInt = 5000
    """Characters of the core block from which it is compressed."""
    compressed_characters: PositiveInt = 3000
    """Characters that a compressed block stays below; after two tries without success it is cut at a line."""


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
    return from_template("memory", f"membuilder_{role}", dialogue, schema(role), ROOM, data, **own)


class MemBuilderBank(LoggedBank, of=MemBuilderSystem):
    """The block has no sources where it is retrieved, since nobody can tell which turns a line of it is from; the log
    has those that each operation named."""

    system: MemBuilderSystem
    keeps_versions = True

    def remember(self, session: Session) -> None:
        turns = tuple(turn.id for turn in session.turns)
        occasion = Occasion(self.dialogue_id, session.id, dated(session.time), turns)
        near = list(self.encoder.encode_apart([turn_text(turn) for turn in session.turns]))
        entries = {role: self.entries(self.nearest(near, self.system.shown, role)) for role in ROLES[1:]}
        entries["core"] = self._block()
        limit, operations = self.system.block_characters, list[Operation]()
        requests = [request(role, self.dialogue_id, session, entries[role], limit) for role in ROLES]
        replies = dict(zip(ROLES, self.replies(requests), strict=True))
        for role, (reply, by) in replies.items():
            place = self.first() + len(operations)
            operations += self.proposed(role, reply, replace(occasion, by=by), entries[role], place)
        self.commit(operations)
        self._compress(replace(occasion, turns=()))

    def rank(self, query: Query, k: int | None, trace: dict[str, Any]) -> Iterator[tuple[int, float] | Memory]:
        yield from ((int(block.id[1:]), 1.0) for block in self._block() if block.text)
        yield from self.store.rank(query.text, "dense")

    def _block(self) -> list[Entry]:
        return self.entries(self.store.numbers("core"))

    def _compress(self, occasion: Occasion) -> None:
        """Shorten a block that is too long (Appendix C.2)."""
        failures = len(self.lost)
        most, limit = self.system.block_characters, self.system.compressed_characters
        for attempt in range(TRIES + 1):
            block = next(iter(self._block()), None)
            if block is None or len(block.text) <= (limit if attempt else most):
                break
            text, by = _newest(block.text, limit), dict[str, str]()
            if attempt < TRIES and len(self.lost) == failures:
                data = {"block": block.text}
                ask = from_template("compress", "membuilder_compress", self.dialogue_id, None, ROOM, data, limit=limit)
                for reply, name in self.replies([ask]):
                    if shorter := words(reply):
                        text, by = shorter, name
            place = (self.first(), occasion.dialogue, occasion.session, "core", "REWRITE", f"m{self.first()}")
            self.commit([Operation(*place, (block.id,), text, occasion.time, by=by)])


def _newest(block: str, limit: int) -> str:
    """The last lines of a block that together stay below the limit; of a longer line its beginning."""
    lines = block.splitlines()
    while len(lines) > 1 and len("\n".join(lines)) >= limit:
        lines = lines[1:]
    return "\n".join(lines)[: limit - 1]
