"""What went wrong with a try, whether to try again, and how long to wait."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

from remind.llm.request import ReplyFailure

#: Seconds before the second try; doubled for each further one, up to the longest.
FIRST_WAIT = 0.5
LONGEST_WAIT = 30.0
#: A server that asks to wait longer than this is not waited for.
PATIENCE = 300.0
#: Statuses besides 5xx that pass by themselves: time-out, conflict, too early, too many requests.
_PASSING = frozenset({408, 409, 425, 429})
#: How servers say that prompt and answer do not fit the model: vLLM, SGLang, llama.cpp, TGI, OpenAI, Gemini, Claude.
_TOO_LONG = re.compile(
    r"context[ _-]?(length|window|size)|max_model_len|prompt is too long|input is too long|too many input tokens"
    r"|maximum number of (input )?tokens|max_total_tokens|inputs.{0,20}tokens.{0,40}must be <="
    r"|exceeds? the maximum allowed (input|prompt)",
    re.IGNORECASE,
)
#: A key a server quotes back, masked or not.
_KEY = re.compile(r"\b(?:sk|pk|key|hf|gsk|xai)[-_][\w*.…-]{6,}|\bBearer\s+\S+", re.IGNORECASE)


@dataclass(eq=False)
class Trouble(Exception):
    """A try without a usable reply.

    Attributes:
        failure: what the reply is reported as if this was the last try.
        message: one line without keys.
        again: whether another try may end otherwise.
        after: seconds the server asks to wait; None: it does not say.
        reached: whether a server was there at all.
    """

    failure: ReplyFailure
    message: str
    again: bool = False
    after: float | None = None
    reached: bool = True


def clean(text: str, key: str | None, limit: int = 300) -> str:
    """One line, cut, without the key."""
    if key and len(key) >= 6:
        text = text.replace(key, "[key]")
    return _KEY.sub("[key]", " ".join(text.split()))[:limit]


def of_status(status: int, body: Any, headers: Mapping[str, str], key: str | None) -> Trouble:
    """The trouble an HTTP status and its body tell of.

    Args:
        body: parsed JSON or text, as far as there is one.
    """
    code, said = _said(body)
    line = clean(f"HTTP {status}" + (f": {said}" if said else ""), key)
    # redirects are not followed, and where one leads to is no part of the message: it may hold a query
    if 300 <= status < 400:
        return Trouble("refused", f"HTTP {status}: the server sends requests elsewhere; name that address as base_url")
    # servers quote the key, masked, when they refuse it
    if status == 401:
        return Trouble("refused", "HTTP 401: the server refuses the key")
    if status in (400, 413, 422) and (code in _CODES or _TOO_LONG.search(said)):
        return Trouble("too_long", line)
    if status == 413:
        return Trouble("too_long", line)
    # the quota is spent: no wait helps
    if status == 429 and code == "insufficient_quota":
        return Trouble("refused", line)
    if status in _PASSING or status >= 500:
        # some servers answer a prompt that does not fit with 500
        if status == 500 and code in _CODES:
            return Trouble("too_long", line)
        return Trouble("server", line, again=True, after=retry_after(headers))
    return Trouble("refused", line)


_CODES = frozenset({"context_length_exceeded", "exceed_context_size_error"})


def _said(body: Any) -> tuple[str, str]:
    """Code and message of an error body in any of the shapes servers use."""
    if isinstance(body, Mapping):
        inner = body.get("error", body)
        if isinstance(inner, Mapping):
            code = str(inner.get("code") or inner.get("type") or "")
            if inner.get("type") in _CODES:
                code = str(inner["type"])
            return code, str(inner.get("message") or inner.get("detail") or "")
        return "", str(inner)
    return "", body if isinstance(body, str) and "<html" not in body.lower() else ""


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds the headers ask to wait: retry-after-ms, or Retry-After as seconds or as a date; None: nothing usable."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) * scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - (time.time() if now is None else now)
            except (TypeError, ValueError):
                continue
        if seconds == seconds:
            return max(0.0, seconds)
    return None


def wait(tries: int, after: float | None, rng: random.Random) -> float:
    """Seconds before the next try: between half and all of a doubling time, and never less than the server asks.

    The jitter keeps clients that failed together from coming back together.
    """
    grown = min(FIRST_WAIT * 2.0 ** (tries - 1), LONGEST_WAIT)
    return (after or 0.0) + grown * (0.5 + 0.5 * rng.random())
