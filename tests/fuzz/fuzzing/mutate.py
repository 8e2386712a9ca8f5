"""Mutations: of the values in a JSON file, and of its bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

#: What stands in the place of a value and is spelt by hand, since `json` would not write it.
_RAW = (
    "NaN",
    "-Infinity",
    "1e400",
    "1" * 5000,
    "-" + "9" * 40,
    "[" * 100_000 + "]" * 100_000,
    "[" * 900 + "]" * 900,
    '{"a":' * 2000 + "1" + "}" * 2000,
    '"\\ud800"',
    '"a\\ud83d\\u0041"',
    '"\\u0000"',
    "{",
    "tru",
)
_TEXTS = (
    "",
    " ",
    "\t\n",
    "\0",
    "a\0b",
    "\u202eabc",
    "e\u0301",
    "\u00e9",
    "\ufb01",
    "\u2028",
    "\x85",
    "\x1b[2J",
    "A ",
    "S1",
    "D1:1",
    "D1:1-D9:99999",
    "D" + " " * 500 + "1",
    "../x",
    "/etc/passwd",
    "..\\x",
    "file:///etc/passwd",
    "https://example.org/x",
    "x" * 5000,
    "['a', {[]: 1}]",
    "['\\N{x}']",
    "session_1",
    "99/99/9999",
    "0000/00/00 (x) 99:99",
)
_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    2,
    2**63,
    10**30,
    0.5,
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"a": [{}]},
)
_MARKS = tuple(f"@raw{number}@" for number in range(len(_RAW)))
_BYTES = (
    b"\xff",
    b"\xef\xbb\xbf",
    b"\x00",
    b"\xed\xa0\x80",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"\\u",
    b"\\ud800",
    b"<answer>",
    b"</answer>",
    b"< / explanation >",
    b"\xe2\x80\xa8",
    b"9" * 5000,
)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to four mutations of a file; of its values where it is JSON, else and sometimes of its bytes."""
    values = _parse(data) if rng.random() < 0.75 else None
    if values is not None:
        try:
            return _spelt(_changed(*values, rng), rng)
        except (ValueError, RecursionError):  # by and by nested too deeply to be copied, or numbers too long to be told
            pass
    for _ in range(rng.randint(1, 4)):
        data = change_bytes(data, rng)
    return data


def _changed(value: Any, is_list: bool, lines: bool, rng: random.Random) -> str:
    holder = [value]
    for _ in range(rng.randint(1, 4)):
        change_value(holder, rng)
    if isinstance(holder[0], list) and lines:
        return "\n".join(json.dumps(item) for item in holder[0])
    return json.dumps(holder[0] if is_list or lines or rng.random() < 0.8 else [holder[0]])


def _parse(data: bytes) -> tuple[Any, bool, bool] | None:
    """The value of a file, whether it is a list, and whether it is one a line."""
    try:
        text = data.decode()
        lines = text.splitlines()
        if len(lines) > 1 and text.startswith("{") and lines[0].endswith("}"):
            return [json.loads(line) for line in lines if line], True, True
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value, isinstance(value, list), False


def change_value(holder: list[Any], rng: random.Random) -> None:
    """Change one place anywhere in a value."""
    container, key = _place(holder, rng)
    old = container[key]
    choice = rng.randrange(8)
    if type(old) is int and rng.random() < 0.5:
        container[key] = rng.choice((-1, 0, old + 1, old - 1, old * 2, 10**6))
    elif choice == 0:
        container[key] = copy.deepcopy(rng.choice(_VALUES))
    elif choice == 1:
        container[key] = rng.choice(_TEXTS)
    elif choice == 2:
        container[key] = rng.choice(_MARKS)
    elif choice == 3 and container is not holder:
        del container[key]
    elif choice == 4 and isinstance(container, list) and container is not holder:
        container.insert(rng.randint(0, len(container)), copy.deepcopy(old))
    elif choice == 5 and isinstance(container, dict):
        other = rng.choice([*container, *_TEXTS])
        container[other] = container.pop(key)
    elif choice == 6 and isinstance(old, str):
        cut = rng.randint(0, len(old))
        container[key] = old[:cut] + rng.choice(_TEXTS) + old[cut:]
    else:
        container[key] = rng.choice([[old], {"a": old}, str(old)[:1000], old])


def _place(holder: list[Any], rng: random.Random) -> tuple[Any, Any]:
    container: Any = holder
    while True:
        key = rng.choice(list(container)) if isinstance(container, dict) else rng.randrange(len(container))
        inner = container[key]
        if not isinstance(inner, dict | list) or not inner or rng.random() < 0.15:
            return container, key
        container = inner


def _spelt(text: str, rng: random.Random) -> bytes:
    for mark, raw in zip(_MARKS, _RAW, strict=True):
        text = text.replace(f'"{mark}"', raw)
    if rng.random() < 0.1 and '": ' in text:
        # a key twice in one object
        end = text.index('": ', rng.randrange(text.rindex('": ') + 1))
        start = text.rindex('"', 0, end)
        text = f"{text[:start]}{text[start : end + 1]}: {rng.choice(['null', '1', '[]'])}, {text[start:]}"
    data = text.encode("utf-8", "surrogatepass")
    choice = rng.random()
    if choice < 0.02:
        return data.replace(b"\n", b"\r\n")
    if choice < 0.04:
        return b"\xef\xbb\xbf" + data
    if choice < 0.05:
        return text.encode("utf-16", "surrogatepass")
    return data


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """One mutation of bytes."""
    at = rng.randint(0, len(data))
    length = rng.choice((1, 1, 2, 8, 64))
    choice = rng.randrange(7)
    if choice == 0 and at < len(data):
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if choice == 1:
        return data[:at] + data[at + length :]
    if choice == 2:
        return data[:at] + data[at : at + length] + data[at:]
    if choice == 3:
        return data[:at]
    if choice == 4:
        return data[:at] + rng.randbytes(length) + data[at + length :]
    return data[:at] + rng.choice((*_BYTES, *(text.encode() for text in _TEXTS))) + data[at:]
