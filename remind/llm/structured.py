"""JSON in a model's reply: found, read with tolerance, and asked for once more where it does not fit."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from remind.llm.request import Message
from remind.text.thoughts import without_thoughts

_CODE_BLOCK = re.compile(r"```[\w-]*[ \t]*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")
#: Positions of a text at which a value is looked for; a text full of brackets would otherwise take quadratic time.
_MAX_STARTS = 200
_BOOLEANS = {"true": True, "yes": True, "correct": True, "false": False, "no": False, "incorrect": False}


class NotValid(Exception):
    """The text is not the JSON asked for; the message says why, in words for the model that wrote it."""


def object_schema(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    rest = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


def read_value(text: str, schema: Mapping[str, Any], finished: bool = True) -> Any:
    """The JSON value in a model's reply, in the form that the schema asks for (`fitted`).

    The whole text, else a fenced block, else the outermost value that starts somewhere in it; of several the first
    that matches the schema. A reply that was cut off is never taken, since what is missing cannot be known.

    Raises:
        NotValid: none matches.
    """
    if not finished:
        raise NotValid("the reply was cut off before its end; be shorter")
    reason = ""
    for found in _values(without_thoughts(text)):
        value = fitted(found, schema)
        problem = _problem(value, schema)
        if problem is None:
            return value
        reason = reason or problem
    raise NotValid(reason or "there is no JSON value in the reply")


def fitted(value: Any, schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> Any:
    """The value with what models do to forms undone; what cannot be is left for the check.

    Further keys are left out; keys, enums and truth values may be spelled in other case; a list may be a bare item or
    too long, an object of one field its bare value, a text an object around it, a number its digits.
    """
    root = schema if root is None else root
    if "$ref" in schema:
        return fitted(value, _target(schema["$ref"], root), root)
    if "anyOf" in schema:
        choices = [(fitted(value, one, root), one) for one in schema["anyOf"]]
        defined = {"$defs": root.get("$defs", {})}
        return next((choice for choice, one in choices if _problem(choice, {**one, **defined}) is None), value)
    kind, fields = schema.get("type"), schema.get("properties", {})
    if kind == "object":
        if not isinstance(value, Mapping) and len(fields) == 1:
            value = {next(iter(fields)): value}
        if not isinstance(value, Mapping):
            return value
        given = {_plain_key(key): item for key, item in value.items()}
        extra = {} if schema.get("additionalProperties") is False or not fields else value
        known = {
            name: fitted(given[_plain_key(name)], one, root)
            for name, one in fields.items()
            if _plain_key(name) in given
        }
        return {**extra, **known}
    if kind == "array":
        items = value if isinstance(value, list) else [value]
        if schema.get("minItems") != schema.get("maxItems"):
            items = items[: schema.get("maxItems")]
        return [fitted(item, schema.get("items", {}), root) for item in items]
    if kind == "string" and isinstance(value, Mapping):
        value = next((item for item in value.values() if isinstance(item, str)), value)
    if "enum" in schema or "const" in schema:
        names = schema.get("enum", [schema.get("const")])
        return next((one for one in names if str(one).casefold() == str(value).strip().casefold()), value)
    if isinstance(value, str) and kind == "boolean":
        return _BOOLEANS.get(value.strip(" .").lower(), value)
    if (
        isinstance(value, str)
        and kind in ("integer", "number")
        and re.fullmatch(r"-?\d{1,15}(\.\d{1,15})?", value.strip())
    ):
        return _number(value)
    return value


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
    """A small value of the schema's shape, for a run in which nothing is asked; null for a type inside itself."""
    root = schema if root is None else root
    if "$ref" in schema:
        name = schema["$ref"]
        return None if name in inside else placeholder(_target(name, root), root, inside | {name})
    if "anyOf" in schema:
        return placeholder(schema["anyOf"][0], root, inside)
    if "enum" in schema or "const" in schema:
        return schema.get("enum", [schema.get("const")])[0]
    kind = schema.get("type", "object")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return {name: placeholder(part, root, inside) for name, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [placeholder(schema.get("items", {"type": "string"}), root, inside)] * max(1, schema.get("minItems", 1))
    return {"string": "-", "integer": schema.get("minimum", 0), "number": schema.get("minimum", 0.0)}.get(kind, False)


def _target(name: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the schema (`#/$defs/Name`) stands for."""
    target: Any = root
    for part in name.removeprefix("#").strip("/").split("/"):
        target = target.get(part, {})
    return target


def _plain_key(key: str) -> str:
    return re.sub(r"[\s-]+", "_", key.strip()).casefold()


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
