"""JSON in replies is found wherever it stands, and read in the form that was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from remind.llm.structured import NotValid, object_schema, read_value

TEXT = {"type": "string"}
FACTS = object_schema(facts={"type": "array", "items": TEXT, "maxItems": 3})
EVENTS = object_schema(
    memory={"type": "array", "items": object_schema(event={"enum": ["ADD", "NONE"]}, n={"type": "integer"})}
)
GRADE = object_schema(score={"anyOf": [{"type": "number", "maximum": 1}, {"type": "null"}]}, fine={"type": "boolean"})
SUMMARY = object_schema(
    understanding=TEXT, evidence={"type": "array", "items": object_schema(finding=TEXT)}, conclusion=TEXT
)
FOUND = {"understanding": "u", "evidence": [{"finding": "f"}], "conclusion": "c"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (' \n{"a": 1}\n', {"a": 1}),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', {"a": 1}),
        ('{"b": 2} then {"a": 1} then {"a": 2}', {"a": 1}),
        ('<think>maybe {"a": 7}</think>{"a": 1}', {"a": 1}),
        ('<think>maybe {"a": 7}', None),
        ('{"a": NaN}', None),
        ('{"a": 1', None),
    ],
)
def test_values_in_replies(text: str, value: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    if value is None:
        with pytest.raises(NotValid):
            read_value(text, schema)
    else:
        assert read_value(text, schema) == value
    with pytest.raises(NotValid, match="cut off"):
        read_value('{"a": 1}', schema, finished=False)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (FACTS, '{"facts": ["a"], "language": "en"}', {"facts": ["a"]}),
        (FACTS, '["a", "b"]', {"facts": ["a", "b"]}),
        (FACTS, '{"facts": [{"fact": "a", "category": "x"}]}', {"facts": ["a"]}),
        (FACTS, '{"facts": ["a", "b", "c", "d"]}', {"facts": ["a", "b", "c"]}),
        (EVENTS, '{"memory": {"Event": "add", "n": "3", "why": "new"}}', {"memory": [{"event": "ADD", "n": 3}]}),
        (GRADE, '{"score": "0.5", "fine": "Yes"}', {"score": 0.5, "fine": True}),
        (GRADE, '{"score": null, "fine": false}', {"score": None, "fine": False}),
        (SUMMARY, '{"Understanding": "u", "conclusion": "c", "evidence": {"finding": "f", "why": "so"}}', FOUND),
    ],
)
def test_forms_are_read_with_tolerance(schema: Any, text: str, value: Any) -> None:
    if value is None:
        with pytest.raises(NotValid):
            read_value(text, schema)
    else:
        assert read_value(text, schema) == value
