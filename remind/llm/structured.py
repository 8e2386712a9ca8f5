"""JSON in a model's reply: found, and read with tolerance."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from remind.text.thoughts import without_thoughts

#: Positions of a text at which a value is looked for; a text full of brackets would otherwise take quadratic time.
_MAX_STARTS = 200
#: What models write for a truth value.
TRUTH = dict.fromkeys(("true", "yes", "correct", "1"), True) | dict.fromkeys(("false", "no", "incorrect", "0"), False)


class NotValid(Exception):
    """The text is not the JSON asked for; the message says why."""


def object_schema(**properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties and no others."""
    rest = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **rest}


def read_value(text: str, schema: Mapping[str, Any], finished: bool = True) -> Any:
    """The JSON value in a model's reply, in the form that the schema asks for (`fitted`).

    The whole text, else the first value that starts somewhere in it and matches the schema. A reply that was cut off
    is never taken, since what is missing cannot be known.

    Raises:
        NotValid: none matches.
    """
    import jsonschema

    if not finished:
        raise NotValid("the reply was cut off before its end")
    reason = ""
    for found in _values(without_thoughts(text)):
        value = fitted(found, schema)
        try:
            jsonschema.validate(value, schema)
            return value
        except jsonschema.ValidationError as error:
            reason = reason or f"{error.json_path}: {' '.join(error.message.split())[:300]}"
    raise NotValid(reason or "there is no JSON value in the reply")


def fitted(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value with what models do to forms undone; what cannot be is left for the check.

    Further keys are left out; keys, enums and truth values may be spelled in other case; a list may be a bare item,
    null or too long, an object of one field its bare value, a text a number or an object around it, a number its
    digits.
    """
    import jsonschema

    if "anyOf" in schema:
        choices = [(value, one) for one in schema["anyOf"]] + [(fitted(value, one), one) for one in schema["anyOf"]]
        return next((item for item, one in choices if jsonschema.Draft202012Validator(one).is_valid(item)), value)
    kind, fields = schema.get("type"), schema.get("properties")
    if kind == "object" and fields:
        if not isinstance(value, Mapping):
            value = dict.fromkeys(fields, value) if len(fields) == 1 else {}
        given = {_plain_key(key): item for key, item in value.items()}
        places = {name: _plain_key(name) for name in fields}
        return {name: fitted(given[key], fields[name]) for name, key in places.items() if key in given}
    if kind == "array":
        items = value if isinstance(value, list) else [] if value is None else [value]
        if schema.get("minItems") != schema.get("maxItems"):
            items = items[: schema.get("maxItems")]
        return [fitted(item, schema.get("items", {})) for item in items]
    if kind == "string" and isinstance(value, Mapping):
        value = next((item for item in value.values() if isinstance(item, str)), value)
    if "enum" in schema or "const" in schema:
        names = schema.get("enum", [schema.get("const")])
        return next((one for one in names if str(one).casefold() == str(value).strip().casefold()), value)
    if kind == "string" and isinstance(value, int | float):
        return str(value)
    if kind == "boolean":
        return TRUTH.get(str(value).strip(" .").lower(), value)
    if kind in ("integer", "number") and isinstance(value, str):
        value = next(_values(value), value)
    # 1.0 is an integer to a schema, and should be one to those who count by it
    return int(value) if kind == "integer" and isinstance(value, float) and value.is_integer() else value


def placeholder(schema: Mapping[str, Any]) -> Any:
    """A small value of the schema's shape, for a run in which nothing is asked."""
    if "anyOf" in schema:
        return placeholder(schema["anyOf"][0])
    if "enum" in schema or "const" in schema:
        return schema.get("enum", [schema.get("const")])[0]
    kind = schema.get("type", "object")
    if kind == "object":
        return {name: placeholder(part) for name, part in schema.get("properties", {}).items()}
    if kind == "array":
        return [placeholder(schema.get("items", {"type": "string"}))] * max(1, schema.get("minItems", 1))
    return {"string": "-", "boolean": False}.get(kind, schema.get("minimum", 0))


def _plain_key(key: str) -> str:
    return key.strip().replace(" ", "_").replace("-", "_").casefold()


def _values(text: str) -> Iterator[Any]:
    """JSON values in the text, the likeliest first."""
    decoder, end = json.JSONDecoder(parse_constant=_refuse), 0
    with suppress(ValueError, RecursionError):
        yield decoder.decode(text.strip())
    for start in [place for place, character in enumerate(text) if character in "{["][:_MAX_STARTS]:
        with suppress(ValueError, RecursionError):
            if start >= end:
                value, end = decoder.raw_decode(text, start)
                yield value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
