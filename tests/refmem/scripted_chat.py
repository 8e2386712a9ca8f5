"""A chat model that follows a script, in this process or behind a server: valid items, and wrong guesses."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from remind.llm.request import Reply, Request


class Scripted:
    """Replies with what a function of the request gives: a reply, its text, or its JSON value; None: an invalid one."""

    def __init__(self, answer: Callable[[Request], Any], name: str = "scripted") -> None:
        self.answer, self.name = answer, name
        self.batches: list[list[Request]] = []

    @property
    def requests(self) -> list[Request]:
        return [request for batch in self.batches for request in batch]

    def complete(self, requests: Sequence[Request], on_reply: Any = None) -> list[Reply]:
        self.batches.append(list(requests))
        replies = [as_reply(self.answer(request)) for request in requests]
        for told in enumerate(replies if on_reply else ()):
            on_reply(*told)
        return replies


def as_reply(value: Any) -> Reply:
    """A reply as the client gives it: with a value where there is JSON."""
    if value is None:
        return Reply("no", failure="invalid")
    if isinstance(value, Reply | str):
        return value if isinstance(value, Reply) else Reply(value)
    return Reply(json.dumps(value), value)


def items_for(system: str, user: str) -> dict[str, Any]:
    """What refmem_items.j2 asks for: as many items of each format as it allows, on turns and images of the passages.

    Each item has words of its own, so that none is a duplicate of another or gives its answer away.
    """
    turns = re.findall(r"^\[(?!image \d+\])([^\]]+)\]", user, re.MULTILINE)
    images = [int(index) for index in re.findall(r"^\[image (\d+)\]", user, re.MULTILINE)]
    most = re.search(r"at most (\d+) questions", system)
    assert most is not None
    rows = []
    for kind in re.findall(r'^- "(single|multi|direct)":', system, re.MULTILINE):
        for number in range(int(most[1])):
            digest = hashlib.sha256(f"{system}{user}{kind}{number}".encode()).hexdigest()
            words = [digest[place : place + 8] for place in range(0, 32, 8)]
            rows.append(
                {
                    "format": kind,
                    "question": f"Which word goes with {digest[32:40]}, {digest[40:48]} and {digest[48:56]}?",
                    "options": [] if kind == "direct" else words,
                    "answers": {"single": ["B"], "multi": ["A", "C"], "direct": words[:1]}[kind],
                    "candidates": words if kind == "direct" else [],
                    "evidence": [turns[0], turns[-1]],
                    "images": images[:2] if 'in "images"' in system else [],
                }
            )
    return {"items": rows}


def told_for(system: str, user: str) -> dict[str, Any] | None:
    """What refmem_p13n.j2 asks for, step by step: a signal and a point of each speaker, and a group of all signals."""
    word = hashlib.sha256(user.encode()).hexdigest()[:8]
    who = {name: int(number) for number, name in re.findall(r"^(\d+)\. ([^:\n]+): ", user, re.MULTILINE)}
    for step in ("signals", "points"):
        if f'{{"{step}": [{{"speaker"' in system:
            rows = [{"speaker": name, "text": f"{name} likes {word}", "turns": [n]} for name, n in who.items()]
            return {step: rows}
    signals = re.findall(r"^(\d+)\. ", user.partition("signals")[2].partition("points")[0], re.MULTILINE)
    if '{"groups"' in system:
        return {"groups": [{"topic": f"about {word}", "points": [1], "signals": list(map(int, signals))}]}
    if '"implicit_personalisation"' in system:
        asks = [("recommendation", "What would suit me"), ("implicit_personalisation", "My day is free")]
        return {
            "questions": [
                {"kind": kind, "question": f"{text}, {word}?", "answer": f"{word}, as you like.", "signals": [1, 2]}
                for kind, text in asks
            ]
        }
    return None


def value_for(system: str, user: str) -> dict[str, Any] | None:
    """The reply to a prompt of a build; None for any other prompt."""
    if '"candidates"' in system:
        return items_for(system, user)
    if "conversation that you do not have" in system:
        return {"answers": ["nothing"]}
    return told_for(system, user)
