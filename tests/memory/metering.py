"""A meter before a fake server, and a client of the package openai before the meter."""

from __future__ import annotations

import http.client
import json
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
from words import WordEncoder

from remind.llm.endpoints import EndpointConfig
from remind.memory.meter import Meter

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "", "parameters": SCHEMA}}


def meter(url: str, folder: Path | None = None, **fields: Any) -> Meter:
    """A meter before the server at that address; cache and costs in the folder."""
    own = {name: fields.pop(name) for name in ("dry_run", "normalise") if name in fields}
    files = (None, None) if folder is None else (folder / "c.sqlite", folder / "costs.jsonl")
    usual = {"model": "m", "base_url": url, "price_prompt": 1e6, "price_completion": 2e6}
    return Meter(EndpointConfig(**{**usual, **fields}), WordEncoder(4), *files, **own)


@cache
def client() -> Any:
    """A client of the package openai; what it retries by itself would show in the counts."""
    return openai.OpenAI(base_url="http://127.0.0.1:9", api_key="of-the-client", max_retries=2)


def say(url: str, text: str, **fields: Any) -> Any:
    messages = [{"role": "user", "content": text}]
    chats = client().with_options(base_url=url).chat.completions
    return chats.create(**{"model": "gpt-x", "messages": messages, "temperature": 0.7, **fields})


def words(reply: Any) -> str:
    return reply.choices[0].message.content


def send(url: str, path: str, body: bytes | None, method: str = "POST", **heads: str) -> tuple[int, Any]:
    """Status and JSON of a bare request."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=30)
    heads = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in heads.items()}}
    connection.request(method, path, body, heads)
    response = connection.getresponse()
    status, content = response.status, json.loads(response.read())
    connection.close()
    return status, content
