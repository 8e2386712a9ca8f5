"""Verdicts on direct answers from a chat model (Eq. 9, Figure 10)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remind.llm.asking import request, without_thought
from remind.llm.fence import code_for, fenced
from remind.llm.request import ChatModel, Reply, Request
from remind.states.pyramid import one_line

VERDICT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"verdict": {"type": "boolean"}},
    "required": ["verdict"],
    "additionalProperties": False,
}
#: The template's name.
PROMPT = "ask_judge"

_FIELD = re.compile(r"[\"']?verdict[\"']?\s*[:=]\s*[\"']?(true|false|yes|no)\b", re.IGNORECASE)
_WORDS = {"yes": True, "true": True, "correct": True, "no": False, "false": False, "incorrect": False}


@dataclass(frozen=True)
class Verdict:
    """What became of one case.

    Attributes:
        value: whether the prediction means the same as a reference; None: there is no verdict, for or against.
        failure: why there is none: as in `Reply`, or "neither" where the reply is neither verdict.
        message: the same in a line.
        reply: what the judge wrote; None where nobody was asked.
    """

    value: bool | None
    failure: str | None = None
    message: str = ""
    reply: Reply | None = None


def judge_request(question: str, references: Sequence[str], prediction: str, sample: str = "") -> Request:
    """Whether the prediction is equivalent to any of the references. All three are fenced as data."""
    asked, said = one_line(question), one_line(prediction)
    gold = "\n".join(f"{number}. {one_line(text)}" for number, text in enumerate(references, start=1))
    code = code_for([asked, gold, said])
    return request(
        "judge",
        PROMPT,
        sample,
        VERDICT_SCHEMA,
        code=code,
        question=fenced("question", asked, code),
        references=fenced("references", gold, code),
        prediction=fenced("prediction", said, code),
    )


def read_verdict(text: str) -> bool | None:
    """The verdict of a reply: its JSON field, or a bare yes or no. None for neither, or for both."""
    text = without_thought(text).strip()
    named = {_WORDS[word.lower()] for word in _FIELD.findall(text)}
    if named:
        return named.pop() if len(named) == 1 else None
    return _WORDS.get(text.strip("\"'`*_.! \n").lower())


def verdicts(
    model: ChatModel, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
) -> list[Verdict]:
    """A verdict per request, in order; what is no verdict is a failure and not a rejection.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    return [_verdict(reply) for reply in model.complete(requests, on_reply)]


def _verdict(reply: Reply) -> Verdict:
    if reply.failure not in (None, "invalid"):
        return Verdict(None, reply.failure, reply.message, reply)
    value = reply.value.get("verdict") if isinstance(reply.value, Mapping) else None
    found = value if isinstance(value, bool) else read_verdict(reply.text)
    if found is None:
        return Verdict(None, "neither", "the judge's reply is neither verdict", reply)
    return Verdict(found, reply=reply)
