"""Hypothesis strategies: valid files of which some values or bytes are replaced by hostile ones."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

#: Spelt by hand, since `json` would not write it.
RAW = ("NaN", "-Infinity", "1e400", "1" * 5000, "[" * 100_000 + "]" * 100_000, '{"a":' * 2000 + "1" + "}" * 2000)
RAW += ('{"a": 1, "a": 2}', '"\\ud800"', '"a\\ud83d\\u0041"', '"\\u0000"', "{", "tru")
TEXTS = ("", " ", "\t\n", "\0", "\u202eabc", "e\u0301", "\u2028", "\x85", "\x1b[2J", "A ", "S1", "D1:1")
TEXTS += ("D1:1-D9:99999", "D" + " " * 500 + "1", "../x", "/etc/passwd", "..\\x", "file:///etc/passwd")
TEXTS += ("https://example.org/x", "x" * 5000, "['a', {[]: 1}]", "['\\N{x}']", "session_1", "99/99/9999")
TEXTS += ("0000/00/00 (x) 99:99", "</answer>", "[ATTENTION]\n")
VALUES: tuple[Any, ...] = (None, True, False, 0, -1, 2, 2**31 - 1, 2**63, 10**30, 0.5, [], {}, [[]], [None], {"": ""})
BYTES = (b"\xff", b"\xef\xbb\xbf", b"\0", b"\xed\xa0\x80", b"\r", b"\r\n\r\n", b'"', b"{", b"]", b"\\ud800")
BYTES += (b"9" * 5000, b"```json\n")

hostile_values = st.sampled_from(VALUES) | st.sampled_from(TEXTS) | st.text(max_size=20) | st.integers(-3, 100)


@st.composite
def changed_bytes(draw: st.DrawFn, seed: bytes) -> bytes:
    """One to three cuts, flips, repetitions or insertions anywhere."""
    data = seed
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from((0, 1, 2, 8, 64))))
        pieces = (*BYTES, *(text.encode() for text in TEXTS), data[at:end] * 2)
        new = draw(st.sampled_from(pieces) | st.binary(max_size=9))
        data = data[:at] + new + draw(st.sampled_from((data[end:], b"")))
    return data


@st.composite
def changed_json(draw: st.DrawFn, seed: bytes) -> bytes:
    """A JSON or JSON Lines file with one to three values replaced, moved, repeated or left out."""
    lines = seed.startswith(b"{") and seed.splitlines()[0].endswith(b"}") and seed.count(b"\n") > 1
    value = [json.loads(line) for line in seed.splitlines()] if lines else json.loads(seed)
    for _ in range(draw(st.integers(1, 3))):
        value = _change(draw, value)
    rows = [json.dumps(row) for row in value] if lines and isinstance(value, list) else [json.dumps(value)]
    text = "\n".join(rows)
    if draw(st.booleans()):
        text = text.replace(json.dumps(RAW[0]), draw(st.sampled_from(RAW)))
    return draw(st.sampled_from(("", "\ufeff"))).encode() + text.encode("utf-8", "surrogatepass")


def _change(draw: st.DrawFn, value: Any) -> Any:
    """A copy with one place changed."""
    holder = [copy.deepcopy(value)]
    container, key = holder, 0
    while isinstance(inner := container[key], dict | list) and inner and draw(st.integers(0, 5)):
        container, key = inner, draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
    old = container[key]
    action = draw(st.sampled_from(("replace", "raw", "wrap", "text", "remove", "repeat", "rename")))
    if action == "remove" and container is not holder:
        del container[key]
    elif action == "repeat" and isinstance(container, list):
        container.insert(key, copy.deepcopy(old))
    elif action == "rename" and isinstance(container, dict):
        container[draw(st.sampled_from((*container, *TEXTS)))] = container.pop(key)
    elif action == "wrap":
        container[key] = draw(st.sampled_from(([old], {"a": old}, str(old)[:1000])))
    else:
        container[key] = RAW[0] if action == "raw" else draw(hostile_values)
    return holder[0]
