"""Endpoints, requests and chat models as the tests of the clients need them."""

from __future__ import annotations

from typing import Any

from remind.llm.client import OpenAIChat, ReplyCache
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Request


def ask(text: str, stage: Any = "judge", **fields: Any) -> Request:
    """A request with one message."""
    return Request((Message("user", text),), stage, **fields)


def chat(url: str, cache: ReplyCache | None = None, ledger: Ledger | None = None, **fields: Any) -> OpenAIChat:
    """A chat model behind the server at that address."""
    return OpenAIChat(EndpointConfig(**{"model": "m", "base_url": url, **fields}), cache, ledger)
