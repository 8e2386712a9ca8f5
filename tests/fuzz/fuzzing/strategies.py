"""Hypothesis strategies: valid files of which some values or bytes are replaced by hostile ones."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

#: Spelt by hand, since `json` would not write it.
RAW = ("NaN", "1e400", "1" * 5000, "[" * 100_000 + "]" * 100_000, '{"a": 1, "a": 2}', '"\\ud800"', '"\\u0000"', "{")
TEXTS = ("", " ", "\0", "\u202eabc", "e\u0301", "\u2028", "A ", "S1", "D1:1", "D1:1-D9:99999", "D" + " " * 500 + "1")
TEXTS += ("../x", "/etc/passwd", "https://example.org/x", "x" * 5000, "['a', {[]: 1}]", "session_1", "99/99/9999")
VALUES: tuple[Any, ...] = (None, True, -1, 2**63, 10**30, 0.5, [], {}, [[]], [None], {"": ""}, *TEXTS)
BYTES = (b"\xff", b"\xef\xbb\xbf", b"\0", b"\r\n\r\n", b'"', b"{", b"]", b"\\ud800", b"9" * 5000)


@st.composite
def changed_bytes(draw: st.DrawFn, seed: bytes) -> bytes:
    """One to three cuts, repetitions or insertions anywhere."""
    data = seed
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from((0, 1, 8, 64))))
        new = draw(st.sampled_from((*BYTES, data[at:end] * 2)) | st.binary(max_size=9))
        data = data[:at] + new + draw(st.sampled_from((data[end:], b"")))
    return data


@st.composite
def changed_json(draw: st.DrawFn, seed: bytes) -> bytes:
    """A JSON or JSON Lines file with one to three values replaced, wrapped, repeated or left out."""
    lines = seed.startswith(b"{") and seed.splitlines()[0].endswith(b"}") and seed.count(b"\n") > 1
    holder = [[json.loads(line) for line in seed.splitlines()] if lines else json.loads(seed)]
    for _ in range(draw(st.integers(1, 3))):
        container, key = holder, 0
        while isinstance(inner := container[key], dict | list) and inner and draw(st.integers(0, 5)):
            places = sorted(inner) if isinstance(inner, dict) else range(len(inner))
            container, key = inner, draw(st.sampled_from(places))
        action = draw(st.sampled_from(("replace", "raw", "wrap", "remove", "repeat")))
        if action == "remove" and container is not holder:
            del container[key]
        elif action == "repeat" and isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        elif action == "wrap":
            container[key] = [container[key]]
        else:
            container[key] = RAW[0] if action == "raw" else draw(st.sampled_from(VALUES))
    rows = holder[0] if lines and isinstance(holder[0], list) else [holder[0]]
    text = "\n".join(map(json.dumps, rows)).replace(json.dumps(RAW[0]), draw(st.sampled_from(RAW)))
    return text.encode("utf-8", "surrogatepass")
