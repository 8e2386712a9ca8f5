"""A server that plays a perfect manager of memories for packages and for our own systems, by what a dialogue says."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import completion

from remind.data.dialogue import Session
from remind.memory.systems import SYSTEMS

#: What a manager makes of each line, and of which memory it is another version. No text: that one is gone.
FACTS: dict[str, tuple[str | None, str | None]] = {
    "I have a cat.": ("Ann has a cat", None),
    "I live in Rome.": ("Bob lives in Rome", None),
    "The cat is called Tom.": ("Ann has a cat called Tom", "Ann has a cat"),
    "Tom the cat ran away.": (None, "Ann has a cat called Tom"),
    "I moved to Oslo.": ("Bob lives in Oslo", "Bob lives in Rome"),
}
_HELD = re.compile(r'<instance id=(\w+) schema_type="Memory">\n(.*?)\n</instance>', re.DOTALL)
#: Memory systems that are packages of others.
PACKAGES = {"mem0_today": "mem0ai", "langmem": "langmem"}
Reply = tuple[int, dict[str, str], bytes]


def installed(name: str) -> bool:
    try:
        version = importlib.metadata.version(PACKAGES[name])
    except importlib.metadata.PackageNotFoundError:
        return False
    return name != "mem0_today" or version.startswith("2.")


def needs(name: str) -> Any:
    reason = f"the extra {SYSTEMS[name].kind.partition('.')[0].removesuffix('_today')} is not installed"
    return pytest.param(name, marks=pytest.mark.skipif(not installed(name), reason=reason))


#: For tests of every package that is installed.
each_package = pytest.mark.parametrize("name", [needs(name) for name in PACKAGES])


def calls(*made: tuple[str, Any]) -> Reply:
    """A reply that calls tools; arguments that are text are sent as they are."""
    listed = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": name, "arguments": data if isinstance(data, str) else json.dumps(data)},
        }
        for place, (name, data) in enumerate(made)
    ]
    reply = json.loads(completion(""))
    reply["choices"][0]["message"] |= {"content": None, "tool_calls": listed}
    return 200, {}, json.dumps(reply).encode()


def tools(body: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in body.get("tools", ())]


def said(body: dict[str, Any]) -> str:
    """What a request shows of the batch at hand, and of nothing else of the dialogue."""
    text = body["messages"][-1]["content"]
    return text.split("<session_")[-1] if tools(body) else text.split("## New Messages")[-1].split("## ")[0]


def shown(body: dict[str, Any]) -> dict[str, str]:
    """Ids of the memories that langmem shows, by text."""
    return {ast.literal_eval(value)["content"]: name for name, value in _HELD.findall(body["messages"][0]["content"])}


def answer(body: dict[str, Any]) -> Reply:
    """A pure function of the request."""
    text = said(body)
    # Mem0's second call as published shows facts in place of lines
    decide = any(f'"{fact}"' in text for fact, _ in FACTS.values())
    facts = [fact for line, fact in FACTS.items() if (f'"{fact[0]}"' if decide else line) in text]
    if not tools(body):
        added = [{"id": str(n), "text": text, "event": "ADD"} for n, (text, _) in enumerate(facts) if text]
        only = "## New Messages" in body["messages"][-1]["content"] or decide
        value = {"memory": added} if only else {"facts": [one["text"] for one in added]}
        return 200, {}, completion(json.dumps(value))
    held, made = shown(body), []
    for text, before in facts:
        if before not in held:
            made += [("Memory", {"content": text})] if text else []
        elif text:
            patch = [{"op": "replace", "path": "/content", "value": text}]
            made.append(("PatchDoc", {"json_doc_id": held[before], "planned_edits": "", "patches": patch}))
        else:
            made.append(("RemoveDoc", {"json_doc_id": held[before]}))
    return calls(*made) if made else (200, {}, completion("Nothing to remember."))


def locomo_dialogue(name: str, sessions: Iterable[Iterable[str]], asked: list[dict[str, Any]]) -> dict[str, Any]:
    """A dialogue in LoCoMo's format, in which Ann and Bob take turns, and questions about it."""
    talk: dict[str, Any] = {"speaker_a": "Ann", "speaker_b": "Bob"}
    for number, texts in enumerate(sessions, start=1):
        talk[f"session_{number}_date_time"] = f"1:56 pm on {number} May, 2023"
        talk[f"session_{number}"] = [
            {"speaker": "Ann" if n % 2 else "Bob", "dia_id": f"D{number}:{n}", "text": text}
            for n, text in enumerate(texts, start=1)
        ]
    return {"sample_id": name, "conversation": talk, "qa": asked}


#: Sessions of lines in which a word of a question leads to the turn that answers it.
SAID = [
    ["I adopted a dog called Rex.", "How lovely, a puppy!", "He is two years old."],
    ["We moved to Lisbon in May.", "Is it warm there?", "Very warm, and the tiles are blue."],
]


def locomo_file(
    path: Path, names: Iterable[str], said: list[list[str]], asked: list[dict[str, Any]], **more: Any
) -> Path:
    """Dialogues in LoCoMo's format, whose turns and questions differ in their last word."""
    samples = []
    for name in names:
        own = [{**one, "question": f"{one['question']} {name}"} for one in asked]
        samples.append(locomo_dialogue(name, [[f"{line} {name}" for line in lines] for lines in said], own) | more)
    path.write_text(json.dumps(samples))
    return path


def locomo() -> list[dict[str, Any]]:
    """The lines in LoCoMo's format, with questions whose gold is easily found where it does not belong."""
    asked = [
        {"question": "Where is Bob?", "answer": "GOLD-answer", "evidence": ["D2:2"], "category": 4},
        {"question": "Who sings?", "adversarial_answer": "GOLD-adversary", "evidence": [], "category": 5},
    ]
    return [locomo_dialogue("conv-1", [list(FACTS)[:3], list(FACTS)[3:]], asked)]


def sessions() -> list[Session]:
    """The same two sessions."""
    from scripted import session

    first, later = list(FACTS)[:3], list(FACTS)[3:]
    named = [[f"{'Bob' if n % 2 else 'Ann'}: {text}" for n, text in enumerate(texts)] for texts in (first, later)]
    return [session("s1", "2023-05-08", *named[0]), session("s2", "2023-06-01", *named[1])]
