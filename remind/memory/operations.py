"""A memory as the fold of a log: every change is one operation, one line of JSON.

Nothing is overwritten. UPDATE and MERGE add an entry that supersedes others, APPEND, REPLACE and REWRITE a version of
the core block, and DELETE leaves a tombstone. A rejected operation stays in the log with its reason and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["applied", "rejected"]
#: Actions that change nothing.
NOTHING = ("SKIP", "NOOP")


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a memory, or one that was refused.

    Attributes:
        seq: place in the log, from 1.
        dialogue, session: where it was made.
        store, op: MemBuilder's (Eq. 1-4) or SaliMory's (Section 3.1), as in `proposals.FIELDS`; "" where a rejected one
            names none.
        entry: id of the entry that it makes; "" where it makes none.
        refs: ids of the entries that it supersedes or deletes; of core the block before.
        text: of the entry; of APPEND and REPLACE the new part; the reason of SKIP; what a rejected one proposed.
        time: of what the entry tells, as precise as it is known; None: unknown.
        sources: ids of the turns it was made from, in the dialogue's order.
        coarse: whether these are the whole session, since nobody told which.
        by: `model`, `prompt` and `key` of the request.
        status: whether it changed the memory.
        why: a rejected one was rejected.
        old: the part of the block that REPLACE replaces.
    """

    seq: int
    dialogue: str
    session: str
    store: str
    op: str
    entry: str = ""
    refs: tuple[str, ...] = ()
    text: str = ""
    time: str | None = None
    sources: tuple[str, ...] = ()
    coarse: bool = False
    by: Mapping[str, str] = field(default_factory=dict)
    status: Status = "applied"
    why: str = ""
    old: str = ""

    def value(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Operation:
        """From JSON as `value` gives it."""
        return cls(**{**value, "refs": tuple(value["refs"]), "sources": tuple(value["sources"])})


@dataclass(frozen=True, slots=True)
class Entry:
    """What an applied operation put into a store.

    Attributes:
        id, store, text, time, session: as in `Operation`; of core the text is the whole block.
        sources: of the operation and of all entries it supersedes.
        coarse: whether some of these are a whole session's.
        supersedes: ids of the entries that it stands for.
    """

    id: str
    store: str
    text: str
    time: str | None = None
    session: str = ""
    sources: tuple[str, ...] = ()
    coarse: bool = False
    supersedes: tuple[str, ...] = ()


@dataclass(frozen=True)
class State:
    """What a log makes of a memory.

    Attributes:
        entries: all there ever were by id, oldest first.
        superseded: for entries that have been superseded, by which ones; several where updates conflict.
        deleted: for deleted entries the place in the log.
        seq: of the last operation.
    """

    entries: Mapping[str, Entry] = field(default_factory=dict)
    superseded: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    deleted: Mapping[str, int] = field(default_factory=dict)
    seq: int = 0

    def kept(self, *stores: str) -> list[Entry]:
        """Entries of these stores that are not deleted, old versions too, oldest first."""
        return [one for one in self.entries.values() if one.store in stores and one.id not in self.deleted]

    def current(self, *stores: str) -> list[Entry]:
        """Entries of these stores that are neither deleted nor superseded, oldest first."""
        return [one for one in self.kept(*stores) if one.id not in self.superseded]

    @property
    def block(self) -> Entry | None:
        """The core block as it is now; None: nothing was ever written to it."""
        return next(iter(self.current("core")), None)


def made(operation: Operation, refs: Iterable[Entry]) -> Entry | None:
    """The entry that an applied operation makes; None: it makes none.

    Args:
        refs: the entries that it names.
    """
    if not operation.entry:
        return None
    before = list(refs)
    block, text = before[0].text if before else "", operation.text
    if operation.op == "APPEND" and block:
        text = f"{block}\n{text}"
    elif operation.op == "REPLACE":
        text = block.replace(operation.old, text)
    sources = dict.fromkeys([source for one in before for source in one.sources] + [*operation.sources])
    coarse = operation.coarse or any(one.coarse for one in before)
    rest = (operation.time, operation.session, tuple(sources), coarse, operation.refs)
    return Entry(operation.entry, operation.store, text, *rest)


def occurrences(text: str, part: str) -> int:
    """How often the part is in the text, overlapping or not; of an empty part 0."""
    return sum(text.startswith(part, place) for place in range(len(text))) if part else 0


def fold(operations: Iterable[Operation], state: State | None = None) -> State:
    """The memory after these operations.

    Args:
        operations: in the order of the log, as `remind.memory.proposals` makes them.
        state: before the first; None: empty.
    """
    state = State() if state is None else state
    entries, superseded, deleted = dict(state.entries), dict(state.superseded), dict(state.deleted)
    seq = state.seq
    for one in operations:
        seq = one.seq
        if one.status == "rejected":
            continue
        if (entry := made(one, (entries[name] for name in one.refs))) is not None:
            entries[entry.id] = entry
            superseded |= {name: (*superseded.get(name, ()), entry.id) for name in entry.supersedes}
        elif one.op == "DELETE":
            deleted |= dict.fromkeys(one.refs, one.seq)
    return State(entries, superseded, deleted, seq)
