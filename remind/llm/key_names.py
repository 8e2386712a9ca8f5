"""Names under which a key, a password or a header could stand in the further fields of a request."""

from __future__ import annotations

import re
from typing import Any

#: Anywhere in a name, written as one word.
_SECRET = re.compile(
    r"apikey|accesskey|privatekey|secret|passw(or)?d|passphrase|credential|cookie|authoriz|authoris|authenticat|bearer"
)
#: As a word of a name.
_WORDS = frozenset({"auth", "oauth", "oauth2", "pwd", "jwt"})
#: Fields of servers that end in a key which is none: places in their caches.
_PLACES = frozenset({"cachekey", "promptcachekey", "extrakey"})
#: What may stand before "token": the one token a model or tokenizer gives a part to.
_PARTS = frozenset({
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "image", "video", "audio", "vision", "boi", "eoi", "start",
    "begin", "end", "stop", "special", "first", "next", "last", "no", "per", "each", "single", "think", "thinking",
    "reasoning", "newline", "fim", "prefix", "suffix", "middle",
})  # fmt: skip
#: What of "…_tokens" is no number and no list of a model's tokens.
_GIVEN = frozenset({"access", "api", "auth", "refresh", "session", "security", "id"})
#: Of a JSON schema: its names are those of properties, which the schema describes and does not give.
_PROPERTIES = frozenset({"properties", "patternProperties", "$defs", "definitions"})


def holds_key(name: str) -> bool:
    """Whether a field of that name could hold a key, however it is written: `x-api-key`, `apiKey`, `API_KEY`."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    words = re.findall(r"[a-z0-9]+", spaced.lower())
    joined = "".join(words)
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if _SECRET.search(joined) or not _WORDS.isdisjoint(words) or joined == "pass" or last == "headers":
        return True
    if last.endswith(("key", "keys")):
        return joined not in _PLACES
    if last == "tokens":
        return before in _GIVEN
    if last.endswith("token"):
        return (last.removesuffix("token") or before) not in _PARTS
    # token_ids and token_budget are the model's; a value is whatever it is called
    return before.endswith("token") and last in ("value", "string", "secret")


def key_name(fields: Any) -> str | None:
    """The first name in fields, at any depth, that could hold a key; None: there is none."""
    open_ = [(fields, False)]
    while open_:
        value, properties = open_.pop()
        if isinstance(value, list | tuple):
            open_ += [(one, False) for one in reversed(value)]
        elif isinstance(value, dict):
            for name, inner in value.items():
                described = properties and isinstance(inner, dict | bool)
                if not described and holds_key(str(name)):
                    return str(name)
            open_ += [(inner, not properties and name in _PROPERTIES) for name, inner in reversed(value.items())]
    return None
