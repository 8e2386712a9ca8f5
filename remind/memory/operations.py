"""A memory as the fold of a log: every change is one operation, one line of JSON; and what a policy replies, as
operations.

Nothing is overwritten. UPDATE and MERGE add an entry that supersedes others, APPEND, REPLACE and REWRITE a version of
the core block, and DELETE leaves a tombstone. A rejected operation stays in the log with its reason and changes
nothing.

The same rules hold for replies in training and in use (MemBuilder, Appendix C.3). What models do to forms is undone
(`remind.llm.structured`); what a reply says has to fit what its role was shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from remind.core.errors import shown as quoted
from remind.llm.request import whole_characters
from remind.llm.structured import NotValid, fitted, object_schema, read_value
from remind.states.pyramid import one_line

Status = Literal["applied", "rejected"]
#: Actions that change nothing.
NOTHING = ("SKIP", "NOOP")
Role = Literal["core", "episodic", "semantic", "procedural", "booster"]
#: The fields of each role's operations.
FIELDS: Mapping[Role, Mapping[str, tuple[str, ...]]] = {
    "core": {"APPEND": ("content",), "REPLACE": ("old_text", "new_text"), "REWRITE": ("content",)},
    "episodic": {"ADD": ("memory",), "UPDATE": ("old", "new_memory"), "MERGE": ("olds", "new_memory")},
    "semantic": {"ADD": ("memory",), "UPDATE": ("old", "new_memory"), "SKIP": ("reason",)},
    "procedural": {"ADD": ("memory",), "UPDATE": ("old", "new_memory")},
    "booster": {
        "ADD": ("store", "text"),
        "UPDATE": ("store", "target", "text"),
        "DELETE": ("store", "target"),
        "NOOP": (),
    },
}
BANKS = ("fact", "preference", "working")
#: Operations of a reply, and characters of one text, at most.
MOST: Mapping[Role, int] = {"core": 1, "episodic": 64, "semantic": 64, "procedural": 64, "booster": 3}
LONGEST = 8000
#: Longest text of a proposal that is kept where it is rejected.
_KEPT = 500
_NUMBERS = {"type": "array", "items": {"type": "integer"}}
#: Of fields that are no text, as the schema asks for them.
_KINDS: Mapping[str, Any] = {
    "old": {"type": "integer"},
    "target": {"type": "integer"},
    "olds": _NUMBERS,
    "store": {"enum": [*BANKS]},
    "sources": _NUMBERS,
}
_OPS = object_schema(ops={"type": "array"})
#: As they are read: an entry may be named by its id or its text, too. Texts of these fields may be empty.
_ENTRY: Mapping[str, Any] = {"type": ["integer", "string"]}
_READ: Mapping[str, Any] = {
    **_KINDS,
    "old": _ENTRY,
    "target": _ENTRY,
    "olds": {"type": "array", "items": _ENTRY, "minItems": 1},
    **{name: {"type": "string", "maxLength": LONGEST} for name in ("old_text", "new_text", "APPEND")},
}
_TIME = r"\d{4}(?:-\d\d(?:-\d\d(?: \d\d:\d\d)?)?)?"
_DATED = re.compile(rf"({_TIME})(?: to ({_TIME}))?: (?=\S)", re.ASCII)
_FORMATS = {4: "%Y", 7: "%Y-%m", 10: "%Y-%m-%d", 16: "%Y-%m-%d %H:%M"}


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of a memory, or one that was refused.

    Attributes:
        seq: place in the log, from 1.
        dialogue, session: where it was made.
        store, op: MemBuilder's (Eq. 1-4) or SaliMory's (Section 3.1), as in `FIELDS`; "" where a rejected one
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


def fold(operations: Iterable[Operation], state: State | None = None) -> State:
    """The memory after these operations.

    Args:
        operations: in the order of the log, as `remind.memory.operations` makes them.
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


# what a policy replies


@dataclass(frozen=True)
class Occasion:
    """Where operations are proposed.

    Attributes:
        dialogue, session: ids.
        time: of the session, as in `Session`; None: unknown.
        turns: ids of the turns that the prompt shows as 1, 2, ...
        by: `Operation.by`.
    """

    dialogue: str
    session: str
    time: str | None
    turns: tuple[str, ...]
    by: Mapping[str, str] = field(default_factory=dict)


def schema(role: Role) -> dict[str, Any]:
    """Of a role's reply."""
    told = () if role == "booster" else ("sources",)
    shapes = [
        object_schema(op={"const": op}, **{name: _KINDS.get(name, {"type": "string"}) for name in (*names, *told)})
        for op, names in FIELDS[role].items()
    ]
    return object_schema(ops={"type": "array", "maxItems": MOST[role], "items": {"anyOf": shapes}})


def _shape(role: Role, op: str) -> dict[str, Any]:
    """Of an operation as it is read: nobody need tell sources, and the booster, who is shown one turn, cannot."""
    text = {"type": "string", "maxLength": LONGEST, "pattern": r"\S"}
    kinds = {name: _READ.get(op if name == "content" else name, text) for name in FIELDS[role][op]}
    told = {} if role == "booster" else {"sources": _NUMBERS}
    return {**object_schema(**kinds, **told), "required": list(kinds), "additionalProperties": True}


def propose(role: Role, reply: str, occasion: Occasion, entries: Sequence[Entry], first: int) -> list[Operation]:
    """The operations of a reply, applied or rejected.

    Args:
        role: who replied.
        reply: the whole text; a thought before it is passed over.
        occasion: where; sources that the reply leaves out are all its turns.
        entries: what the prompt shows as 1, 2, ...; of core its block, if it has one.
        first: place of the first operation in the log. An operation that makes an entry calls it m and its place.

    Returns:
        At least one for a reply that is no list of operations, or of core; none for an empty list of another role.
    """
    place = (first, occasion.dialogue, occasion.session, "" if role == "booster" else role, "", "", (), "")
    bare = Operation(*place, occasion.time, occasion.turns, len(occasion.turns) > 1, occasion.by)
    reply, proposals = whole_characters(reply), []
    try:
        proposals = read_value(reply, _OPS)["ops"]
        if role == "core" and not proposals:
            raise NotValid("core takes one operation, not 0")
    except NotValid as error:
        return [replace(bare, text=reply[:_KEPT], status="rejected", why=str(error))]
    operations = []
    for number, one in enumerate(proposals[: MOST["episodic"]]):
        here = replace(bare, seq=first + number)
        try:
            if number >= MOST[role]:
                raise NotValid(f"more than {MOST[role]} operations")
            operations.append(_checked(role, one, here, occasion, entries))
        except NotValid as error:
            given = one if isinstance(one, dict) else {}
            op, store = (str(given.get(name, "")) for name in ("op", "store"))
            here = replace(here, op=op if op in FIELDS[role] else "", store=store if store in BANKS else here.store)
            operations.append(replace(here, text=json.dumps(one)[:_KEPT], status="rejected", why=str(error)))
    return operations


def _checked(role: Role, one: Any, bare: Operation, occasion: Occasion, entries: Sequence[Entry]) -> Operation:
    """An operation as it is applied, given what is known of it before it is read."""
    import jsonschema

    if not isinstance(one, dict):
        raise NotValid("an operation must be an object")
    # null stands for a field that is left out
    one = {name: value for name, value in one.items() if value is not None}
    op = fitted(one, object_schema(op={"enum": list(FIELDS[role])})).get("op")
    if not isinstance(op, str) or op not in FIELDS[role]:
        raise NotValid(f"{role} has no operation {quoted(op)}")
    shape = _shape(role, op)
    given = fitted(one, shape)
    errors = jsonschema.Draft202012Validator(shape).iter_errors(given)
    if (problem := jsonschema.exceptions.best_match(errors)) is not None:
        raise NotValid(one_line(f"{op}: {problem.json_path.lstrip('$.')} {problem.message[:_KEPT]}"))
    made = replace(bare, op=op, store=given.get("store", bare.store) if op != "NOOP" else "", entry=f"m{bare.seq}")
    if told := given.get("sources"):
        if outside := [number for number in told if not 1 <= number <= len(occasion.turns)]:
            raise NotValid(f"no turn {quoted(outside[0])}; the session has {len(occasion.turns)}")
        made = replace(made, sources=tuple(occasion.turns[number - 1] for number in sorted(set(told))), coarse=False)
    if role == "core":
        text, old = str(given.get("content", given.get("new_text"))).strip(), given.get("old_text", "").strip()
        block = entries[0].text if entries else ""
        count = sum(block.startswith(old, place) for place in range(len(block))) if old else 0
        if op == "REPLACE" and count != 1:
            raise NotValid(f"old_text is in the block {count} times, not once")
        if op == "APPEND" and not text:
            return replace(made, entry="")
        return replace(made, text=text, old=old, refs=tuple(entry.id for entry in entries))
    names = given.get("olds", [given[name] for name in ("old", "target") if name in given])
    refs = [_entry(name, entries, made) for name in names]
    if len(set(refs)) < len(refs):
        raise NotValid(f"{op} names an entry twice")
    text = one_line(next((given[name] for name in ("memory", "new_memory", "text", "reason") if name in given), ""))
    when = _time(text, occasion.time) if role == "episodic" else made.time
    entry = "" if op in (*NOTHING, "DELETE") else made.entry
    return replace(made, entry=entry, text=text, time=when, refs=tuple(refs))


def _entry(value: int | str, entries: Sequence[Entry], made: Operation) -> str:
    """Id of the entry that a proposal names: by number, by id, or by the text that one of them alone has."""
    if isinstance(value, int) or re.fullmatch(r"[0-9]{1,8}", value):
        if not 1 <= int(value) <= len(entries):
            raise NotValid(f"no entry {quoted(int(value))}; {len(entries)} are shown")
        found = [entries[int(value) - 1]]
    else:
        found = [one for one in entries if one.id == value] or [one for one in entries if one.text == one_line(value)]
    if len(found) != 1:
        raise NotValid(f"{quoted(value)} is {'no entry' if not found else f'the text of {len(found)} entries'}")
    if found[0].store != made.store:
        raise NotValid(f"entry {found[0].id} is of {found[0].store}, not of {made.store}")
    return found[0].id


def undated(text: str) -> str:
    """The text of an entry without the time that it begins with: what it is found by."""
    match = _DATED.match(text)
    return text[match.end() :] if match else text


def _time(text: str, session: str | None) -> str | None:
    """The time that an event begins with; None: it has none, nor has its session."""
    match = _DATED.match(text)
    if match is None:
        if session is not None:
            raise NotValid("an event must begin with its time, YYYY[-MM[-DD[ HH:MM]]], a colon and a space")
        return None
    for time in filter(None, match.groups()):
        try:
            datetime.strptime(time, _FORMATS[len(time)])
        except ValueError:
            raise NotValid(f"there is no time {time}") from None
    return match[1].replace(" ", "T")
