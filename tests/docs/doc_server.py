"""What a chat model behind a server says to each stage: enough for states, answers, verdicts and benchmark items."""

from __future__ import annotations

import json
import re
from typing import Any

from fault_proxy import completion
from scripted_chat import value_for

_STRATEGY = {
    "target_speaker": [],
    "related_entities": ["tea"],
    "behavioural_focus": [],
    "temporal_scope": [],
    "reasoning": ["Find what was said."],
}


def reply(body: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
    """Tells by the keys a prompt asks for which stage asks."""
    system, user = body["messages"][0]["content"], body["messages"][-1]["content"]
    if (value := value_for(system, user)) is not None:
        return _json(value)
    if '"verdict"' in system:
        return _json({"verdict": True})
    if '"verdicts"' in system:
        return _json({"verdicts": [True] * int(re.findall(r"exactly (\d+) values", system)[0])})
    if '"ops"' in system:
        core = {"op": "APPEND", "content": "Ana drinks tea.", "sources": [1]}
        return _json({"ops": [core] if "APPEND" in system else []})
    if '"target_speaker"' in system:
        return _json(_STRATEGY)
    if '"understanding"' in system:
        letters = re.findall(r"^([A-Z])\. ", user, re.MULTILINE)
        evidence = [{"option": one, "finding": f"About {one}."} for one in letters] or [{"finding": "She says so."}]
        return _json({"understanding": "What was said.", "evidence": evidence, "conclusion": "It was said."})
    if "<answer>" in system + user:
        return 200, {}, completion("<answer>A</answer><explanation>Ana: tea</explanation>")
    return 200, {}, completion("Ana speaks of tea.")


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {}, completion(json.dumps(value))
