"""What a policy replies, as operations: each is applied, or rejected with its reason (MemBuilder, Appendix C.3).

The same rules hold for replies in training and in use. A reply is one JSON object and nothing else: a fence around it,
or a key given twice, is an error of the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NoReturn

from remind.core.errors import shown as quoted
from remind.core.files import unique_keys
from remind.llm.structured import object_schema
from remind.memory.operations import ACTIONS, NOTHING, Entry, Operation, occurrences
from remind.states.pyramid import one_line
from remind.text.thoughts import without_thoughts

Role = Literal["core", "episodic", "semantic", "procedural", "booster"]
#: The fields of each role's operations; those of references are in `_REFERENCES`.
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
_REFERENCES = ("old", "olds", "target")
#: Longest text of a proposal that is kept where it is rejected.
_KEPT = 500
_TIME = r"\d{4}(?:-\d\d(?:-\d\d(?: \d\d:\d\d)?)?)?"
_DATED = re.compile(rf"({_TIME})(?: to ({_TIME}))?: (?=\S)", re.ASCII)
_FORMATS = {4: "%Y", 7: "%Y-%m", 10: "%Y-%m-%d", 16: "%Y-%m-%d %H:%M"}


class Rejected(ValueError):
    """A proposal of no use; the message says why."""


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
    text, number = {"type": "string"}, {"type": "integer"}
    kinds: dict[str, Any] = {"old": number, "target": number, "olds": {"type": "array", "items": number}}
    kinds |= {"store": {"enum": list(BANKS)}, "sources": {"type": "array", "items": number}}
    shapes = [
        object_schema(op={"const": op}, **{name: kinds.get(name, text) for name in (*names, *_told(role))})
        for op, names in FIELDS[role].items()
    ]
    return object_schema(ops={"type": "array", "maxItems": MOST[role], "items": {"anyOf": shapes}})


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
    try:
        proposals = _read(reply)
        if role == "core" and len(proposals) != 1:
            _reject(f"core takes one operation, not {len(proposals)}")
        if len(proposals) > MOST[role] and role != "booster":
            _reject(f"{len(proposals)} operations; {MOST[role]} are the most")
    except Rejected as error:
        return [_rejected(role, reply, occasion, first, str(error))]
    operations = []
    for number, one in enumerate(proposals[: MOST["episodic"]]):
        try:
            if number >= MOST[role]:
                _reject(f"more than {MOST[role]} operations")
            operations.append(_checked(role, one, occasion, entries, first + number))
        except Rejected as error:
            operations.append(_rejected(role, one, occasion, first + number, str(error)))
    return operations


def _read(reply: str) -> list[Any]:
    text = without_thoughts(reply).strip()
    if text.startswith("```"):
        _reject("fenced: the reply must be JSON alone")
    try:
        value = json.loads(text, object_pairs_hook=unique_keys, parse_constant=_reject)
    except (ValueError, RecursionError) as error:
        _reject(f"not JSON: {' '.join(str(error).split())}")
    if not isinstance(value, dict) or value.keys() != {"ops"} or not isinstance(value["ops"], list):
        _reject('the reply must be {"ops": [...]} and nothing else')
    return value["ops"]


def _checked(role: Role, one: Any, occasion: Occasion, entries: Sequence[Entry], seq: int) -> Operation:
    if not isinstance(one, dict):
        _reject("an operation must be an object")
    # null stands for a field that is left out
    given = {name: value for name, value in one.items() if value is not None}
    op = given.pop("op", None)
    if not isinstance(op, str) or op not in FIELDS[role]:
        _reject(f"{role} has no operation {quoted(op)}")
    told = given.pop("sources", None) if _told(role) else None
    wanted = FIELDS[role][op]
    if missing := [name for name in wanted if name not in given]:
        _reject(f"{op} without {missing[0]}")
    if more := [name for name in given if name not in wanted and not (role == "booster" and op == "NOOP")]:
        _reject(f"{op} has no field {quoted(more[0])}")
    store = given["store"] if role == "booster" and op != "NOOP" else "" if role == "booster" else role
    if role == "booster" and op != "NOOP" and store not in BANKS:
        _reject(f"no store {quoted(store)}")
    sources, coarse = _sources(told, occasion.turns)
    refs: tuple[str, ...] = tuple(_references(given, wanted, store, entries, f"m{seq}"))
    texts = [_text(name, given[name]) for name in wanted if name != "store" and name not in _REFERENCES]
    text, old, when, entry = texts[-1] if texts else "", "", occasion.time, f"m{seq}"
    if role == "core":
        refs, block = tuple(one.id for one in entries), entries[0].text if entries else ""
        if op == "REPLACE":
            old = texts[0]
            if (count := occurrences(block, old)) != 1:
                _reject(f"old_text is in the block {count} times, not once")
        elif op == "APPEND" and not text.strip():
            text, refs, entry = "", (), ""
    elif role != "booster" or texts:
        text = one_line(text)
    if op in ("ADD", "UPDATE", "MERGE", "REWRITE", "SKIP") and not text.strip():
        _reject(f"{op} with an empty text")
    if role == "episodic":
        when = _time(text, occasion.time)
    if op in (*NOTHING, "DELETE"):
        entry = ""
    place = (seq, occasion.dialogue, occasion.session, store, op, entry, refs, text, when)
    return Operation(*place, sources, coarse, occasion.by, old=old)


def _references(
    given: Mapping[str, Any], wanted: Sequence[str], store: str, entries: Sequence[Entry], own: str
) -> Iterator[str]:
    """Ids of the entries that a proposal names: by number, by id, or by the text that one of them alone has."""
    for name in wanted:
        if name not in _REFERENCES:
            continue
        values = given[name] if name == "olds" else [given[name]]
        if not isinstance(values, list) or not values:
            _reject(f"{name} must be a list of entries")
        found = [_entry(value, entries, own) for value in values]
        if foreign := [one for one in found if one.store != store]:
            _reject(f"entry {foreign[0].id} is of {foreign[0].store}, not of {store}")
        if len({one.id for one in found}) < len(found):
            _reject(f"{name} has an entry twice")
        yield from (one.id for one in found)


def _entry(value: Any, entries: Sequence[Entry], own: str) -> Entry:
    if value == own:
        _reject(f"{own} would refer to itself")
    if type(value) is int or (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9):
        if not 1 <= (number := int(value)) <= len(entries):
            _reject(f"no entry {quoted(number)}; {len(entries)} are shown")
        return entries[number - 1]
    if not isinstance(value, str):
        _reject(f"no entry {quoted(value)}")
    found = [one for one in entries if one.id == value] or [one for one in entries if one.text == one_line(value)]
    if len(found) != 1:
        _reject(
            f"{quoted(value)} is no entry that is shown"
            if not found
            else f"{quoted(value)} is the text of {len(found)}"
        )
    return found[0]


def _sources(told: Any, turns: tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
    """The turns that a proposal names, in order, and whether it names none and all stand for them."""
    if told is None or told == []:
        return turns, len(turns) > 1
    if not isinstance(told, list) or not all(type(number) is int for number in told):
        _reject("sources must be a list of turn numbers")
    if outside := [number for number in told if not 1 <= number <= len(turns)]:
        _reject(f"no turn {quoted(outside[0])}; the session has {len(turns)}")
    return tuple(turns[number - 1] for number in sorted(set(told))), False


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        _reject(f"{name} must be text")
    if len(value) > LONGEST:
        _reject(f"{name} has {len(value)} characters; {LONGEST} are the most")
    if any("\ud800" <= letter <= "\udfff" for letter in value):
        _reject(f"{name} has half a character")
    return value.strip()


def undated(text: str) -> str:
    """The text of an entry without the time that it begins with: what it is found by."""
    match = _DATED.match(text)
    return text[match.end() :] if match else text


def _time(text: str, session: str | None) -> str | None:
    """The time that an event begins with; None: it has none, nor has its session."""
    match = _DATED.match(text)
    if match is None:
        if session is not None:
            _reject("an episodic entry must begin with its time, YYYY[-MM[-DD[ HH:MM]]], a colon and a space")
        return None
    for time in filter(None, match.groups()):
        try:
            datetime.strptime(time, _FORMATS[len(time)])
        except ValueError:
            _reject(f"there is no time {time}")
    return match[1].replace(" ", "T")


def _told(role: Role) -> tuple[str, ...]:
    """The field of sources, where a role has one: the booster is shown a single turn."""
    return () if role == "booster" else ("sources",)


def _rejected(role: Role, what: Any, occasion: Occasion, seq: int, why: str) -> Operation:
    given = what if isinstance(what, dict) else {}
    op, store = given.get("op"), given.get("store") if role == "booster" else role
    text = what if isinstance(what, str) else json.dumps(what)
    return Operation(
        seq,
        occasion.dialogue,
        occasion.session,
        str(store) if store in list(ACTIONS) else "",
        str(op) if op in list(FIELDS[role]) else "",
        text=text.encode("ascii", "backslashreplace").decode()[:_KEPT],
        time=occasion.time,
        sources=occasion.turns,
        coarse=len(occasion.turns) > 1,
        by=occasion.by,
        status="rejected",
        why=why,
    )


def _reject(why: str) -> NoReturn:
    raise Rejected(why)
