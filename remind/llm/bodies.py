"""Replies of OpenAI's protocol as JSON, for what speaks it as a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
