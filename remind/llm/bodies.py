"""Requests and replies of OpenAI's protocol as JSON: what our own classes hold, spelled as clients and servers do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from remind.core.errors import shown
from remind.llm.request import Message, Reply, Role

#: What other roles are to a model that knows three.
_ROLES = {"developer": "system"}


def completion(
    model: str, message: Mapping[str, Any], reason: str, prompt_tokens: int, completion_tokens: int
) -> dict[str, Any]:
    """A chat completion with one choice."""
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "message": dict(message), "finish_reason": reason}],
        "usage": {**usage, "total_tokens": prompt_tokens + completion_tokens},
    }


def error(message: str, kind: str = "invalid_request_error", **details: str | None) -> dict[str, Any]:
    """The body of an HTTP error."""
    return {"error": {"message": message, "type": kind, "param": None, "code": None, **details}}


def failed(reply: Reply) -> tuple[int, dict[str, Any]]:
    """Status and body that tell a client of a failed reply: the server's own where it gave any."""
    details = dict(reply.refusal or {})
    status = details.pop("status", 0)
    named = {name: value for name, value in details.items() if value is not None}
    if reply.failure == "too_long":
        named.setdefault("code", "context_length_exceeded")
    if status < 400:
        status = 502 if reply.failure == "server" else 400
    kind = named.pop("type", None) or ("server_error" if status >= 500 else "invalid_request_error")
    return status, error(reply.message or str(reply.failure), kind, **named)


def room(body: Mapping[str, Any], otherwise: int) -> int:
    """Tokens that the body leaves for a reply. Raises ValueError for what is not a number of tokens."""
    for name in ("max_completion_tokens", "max_tokens"):
        if (value := body.get(name)) is not None:
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a whole number above 0, not {shown(value)}")
            return value
    return otherwise


def messages(body: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages of the body for a model that takes text alone. Raises ValueError for anything else in them."""
    result = []
    for message in body["messages"]:
        role = _ROLES.get(str(message.get("role")), message.get("role"))
        parts = message.get("content")
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        if role not in get_args(Role) or not isinstance(parts, list):
            raise ValueError(f"a local model takes no message with role {shown(role)} and content {shown(parts)}")
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("a local model takes text only")
        result.append(Message(cast(Role, role), "".join(cast(list[str], texts))))
    return tuple(result)
