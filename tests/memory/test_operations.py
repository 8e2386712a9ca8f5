"""The log of operations: its lines, its fold against a second interpreter, and what becomes of proposals."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remind.memory.operations import FIELDS, LONGEST, Entry, Occasion, Operation, Role, State, fold, propose

TURNS = ("t1", "t2", "t3")
WHEN = Occasion("d", "s", "2024-05-01", TURNS, {"model": "x", "prompt": "p", "key": "k"})
OLD = [
    Entry("m1", "episodic", "2024-01-01: Ana moved.", sources=("a",)),
    Entry("m2", "episodic", "2024-02-01: Ana ran.", sources=("b",)),
    Entry("m3", "semantic", "Ana has a cat.", sources=("c",)),
    Entry("m4", "semantic", "Ana has a cat.", sources=("d",)),
]
EPISODIC, BLOCK = OLD[:2], Entry("m9", "core", "Name: Ana\nJob: cook\nCat: Tom")


def says(*ops: Any) -> str:
    return json.dumps({"ops": ops})


def one(role: Role, reply: str, entries: Any = (), occasion: Occasion = WHEN) -> Operation:
    (made,) = propose(role, reply, occasion, entries, 20)
    return made


# the fold


def second_interpreter(log: list[Operation]) -> dict[str, Any]:
    """Plain lists and loops: all live texts, what stands for what, tombstones, and versions of the block."""
    rows: list[dict[str, Any]] = []
    blocks = [""]
    gone = set()
    for line in log:
        item = json.loads(json.dumps(line.value()))
        if item["status"] != "applied" or not (item["entry"] or item["op"] == "DELETE"):
            continue
        if item["op"] == "DELETE":
            gone.update(item["refs"])
            continue
        text = item["text"]
        if item["store"] == "core":
            last = blocks[-1]
            if item["op"] == "APPEND":
                text = "\n".join(part for part in (last, text) if part) if last else text
            if item["op"] == "REPLACE":
                head, _, tail = last.partition(item["old"])
                text = head + text + tail
            blocks.append(text)
        sources = []
        for row in rows:
            if row["id"] in item["refs"]:
                sources += row["sources"]
        sources += item["sources"]
        rows.append({"id": item["entry"], "store": item["store"], "text": text, "old": item["refs"]})
        rows[-1]["sources"] = [name for at, name in enumerate(sources) if name not in sources[:at]]
    replaced: dict[str, list[str]] = {}
    for row in rows:
        for name in row["old"]:
            replaced.setdefault(name, []).append(row["id"])
    return {"rows": rows, "gone": gone, "replaced": replaced, "blocks": blocks[1:]}


@st.composite
def replies(draw: st.DrawFn) -> tuple[Role, str]:
    """A role and a reply that is often right."""
    role: Role = draw(st.sampled_from(list(FIELDS)))
    words = st.text("ab \n", max_size=5)
    some: dict[str, Any] = {
        "old": st.integers(0, 6),
        "target": st.one_of(st.integers(0, 9), st.integers(1, 30).map(lambda n: f"m{n}")),
        "olds": st.lists(st.integers(0, 5), max_size=3),
        "store": st.sampled_from(["fact", "working", "core"]),
        "sources": st.lists(st.integers(0, 4), max_size=3),
        "memory": words.map(lambda text: f"2024-02: {text}x"),
        "new_memory": words.map(lambda text: f"2024: {text}y"),
    }
    ops = []
    for _ in range(draw(st.integers(1, 1 if role == "core" else 4))):
        op = draw(st.sampled_from(list(FIELDS[role])))
        names = [*FIELDS[role][op], *(["sources"] if role != "booster" and draw(st.booleans()) else [])]
        ops.append({"op": op, **{name: draw(some.get(name, words)) for name in names}})
    return role, json.dumps({"ops": ops})


@settings(max_examples=60, deadline=None)
@given(st.lists(replies(), max_size=12))
def test_the_fold_is_that_of_a_second_interpreter(told: list[tuple[Role, str]]) -> None:
    log: list[Operation] = []
    state = State()
    for role, reply in told:
        block = [state.block] if state.block else []
        entries = {"core": block, "booster": state.current("fact", "preference", "working")}.get(role)
        new = propose(role, reply, WHEN, state.kept(role) if entries is None else entries, state.seq + 1)
        assert [item.seq for item in new] == list(range(state.seq + 1, state.seq + 1 + len(new)))
        assert all(bool(item.why) == (item.status == "rejected") for item in new)
        state = fold(new, state)
        log += new
    assert fold(Operation.of(json.loads(json.dumps(item.value()))) for item in log) == state
    other = second_interpreter(log)
    assert [(e.id, e.store, e.text, list(e.sources), list(e.supersedes)) for e in state.entries.values()] == [
        (row["id"], row["store"], row["text"], row["sources"], row["old"]) for row in other["rows"]
    ]
    assert state.deleted.keys() == other["gone"]
    assert {name: list(by) for name, by in state.superseded.items()} == other["replaced"]
    assert [e.text for e in state.kept("core")] == other["blocks"]
    assert (state.block.text if state.block else None) == (other["blocks"][-1] if other["blocks"] else None)


# proposals


ADD = {"op": "ADD", "memory": "2024: x"}


@pytest.mark.parametrize(
    ("role", "reply", "entries", "why"),
    [
        ("episodic", "I would add this.", (), "no JSON value"),
        ("episodic", says({"op": "DELETE", "old": 1}), EPISODIC, "episodic has no operation 'DELETE'"),
        ("episodic", says({"op": "ADD", "memory": "Ana ran."}), (), "must begin with its time"),
        ("episodic", says({"op": "ADD", "memory": "2024-02-30: x"}), (), "there is no time 2024-02-30"),
        ("semantic", says({"op": "ADD", "memory": "x" * (LONGEST + 1)}), (), "memory 'xxx"),
        ("episodic", says({**ADD, "sources": [4]}), (), "no turn 4; the session has 3"),
        ("episodic", says({"op": "UPDATE", "old": 3, "new_memory": "2024: x"}), EPISODIC, "no entry 3; 2 are shown"),
        ("episodic", says({"op": "MERGE", "olds": [1, 2, 1], "new_memory": "2024: x"}), EPISODIC, "an entry twice"),
        ("core", says({"op": "REPLACE", "old_text": "m", "new_text": "y"}), [BLOCK], "2 times"),
        ("booster", says({"op": "DELETE", "store": "fact", "target": 1}), EPISODIC, "is of episodic, not of fact"),
    ],
)
def test_what_is_rejected(role: Role, reply: str, entries: Any, why: str) -> None:
    made = one(role, reply, entries)
    assert (made.status, made.entry, made.refs) == ("rejected", "", ())
    assert why in made.why
    assert "\n" not in made.why
    before = State({entry.id: entry for entry in entries}, seq=19)
    assert replace(fold([made], before), seq=19) == before
