"""JSON in a model's reply: found, checked against a schema, and asked for once more where it does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from remind.llm.request import Message

#: What reasoning models write before they answer, where the server leaves it in; to the end where it was cut off.
_THOUGHT = re.compile(r"\A\s*<think>.*?(?:</think>|\Z)", re.DOTALL)
_CODE_BLOCK = re.compile(r"```[\w-]*[ \t]*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")
#: Positions of a text at which a value is looked for; a text full of brackets would otherwise take quadratic time.
_MAX_STARTS = 200


class NotValid(Exception):
    """The text is not the JSON asked for; the message says why, in words for the model that wrote it."""


def object_schema(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    rest = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


def without_thought(text: str) -> str:
    """A model's reply without the thought before it; empty where the thought was cut off."""
    return _THOUGHT.sub("", text)


def read_value(text: str, schema: Mapping[str, Any], finished: bool = True) -> Any:
    """The JSON value in a model's reply.

    The whole text, else a fenced block, else the outermost value that starts somewhere in it; of several the first
    that matches the schema. A reply that was cut off is never taken, since what is missing cannot be known.

    Raises:
        NotValid: none matches.
    """
    if not finished:
        raise NotValid("the reply was cut off before its end; be shorter")
    reason = ""
    for value in _values(without_thought(text)):
        problem = _problem(value, schema)
        if problem is None:
            return value
        reason = reason or problem
    raise NotValid(reason or "there is no JSON value in the reply")


def repair(text: str, reason: str) -> tuple[Message, Message]:
    """The two messages that ask again: what the model wrote, and what was wrong with it."""
    again = (
        f"That reply cannot be used: {reason}. Give the same content again as one JSON value that matches the required "
        "schema. Write nothing before or after it."
    )
    return Message("assistant", text), Message("user", again)


def placeholder(
    schema: Mapping[str, Any], root: Mapping[str, Any] | None = None, inside: frozenset[str] = frozenset()
) -> Any:
    """A small value of the schema's shape, for a run in which nothing is asked.

    Follows type, enum, const, properties, the first of anyOf, and references into the schema, a cyclic one to null.
    """
    root = schema if root is None else root
    if schema.get("enum"):
        return schema["enum"][0]
    if "const" in schema:
        return schema["const"]
    if schema.get("anyOf"):
        return placeholder(schema["anyOf"][0], root, inside)
    if "$ref" in schema:
        if (name := schema["$ref"]) in inside:
            return None
        target = root
        for part in name.removeprefix("#").strip("/").split("/"):
            target = target.get(part, {})
        return placeholder(target, root, inside | {name})
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: placeholder(part, root, inside) for name, part in schema.get("properties", {}).items()}
    if kind == "array":
        item = placeholder(schema.get("items", {"type": "string"}), root, inside)
        return [item] * max(1, int(schema.get("minItems", 1)))
    return {"string": "-", "integer": schema.get("minimum", 0), "number": schema.get("minimum", 0.0)}.get(kind, False)


def _values(text: str) -> list[Any]:
    """JSON values in the text, the likeliest first."""
    values = []
    for part in (text, *_CODE_BLOCK.findall(text)):
        try:
            values.append(json.loads(part, parse_constant=_refuse, parse_float=_number))
        except (ValueError, RecursionError):
            continue
    decoder = json.JSONDecoder(parse_constant=_refuse, parse_float=_number)
    cursor = 0
    for _ in range(_MAX_STARTS):
        match = _START.search(text, cursor)
        if match is None:
            break
        try:
            value, cursor = decoder.raw_decode(text, match.start())
            values.append(value)
        except (ValueError, RecursionError):
            cursor = match.start() + 1
    return values


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _number(text: str) -> float:
    """A JSON number; 1.0 is an integer to a schema, and should be one to those who count by it."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _problem(value: Any, schema: Mapping[str, Any]) -> str | None:
    import jsonschema

    error = jsonschema.exceptions.best_match(jsonschema.Draft202012Validator(schema).iter_errors(value))
    if error is None:
        return None
    place = error.json_path.removeprefix("$").lstrip(".") or "the value"
    return f"{place}: {' '.join(error.message.split())[:300]}"
