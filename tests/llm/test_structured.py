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


def test_a_reply_that_was_cut_off_is_never_taken() -> None:
    with pytest.raises(NotValid, match="cut off"):
        read_value('{"facts": []}', FACTS, finished=False)


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (FACTS, 'Here:\n```json\n{"facts": []}\n```\nDone.', {"facts": []}),
        (FACTS, '{"b": 2} then {"facts": ["a"]} then {"facts": ["b"]}', {"facts": ["a"]}),
        (FACTS, '<think>maybe {"facts": ["a"]}', None),
        (GRADE, '{"score": NaN, "fine": true}', None),
        (FACTS, '{"facts": ["a"], "language": "en"}', {"facts": ["a"]}),
        (FACTS, '["a", "b"]', {"facts": ["a", "b"]}),
        (FACTS, '{"facts": [{"fact": "a", "category": "x"}]}', {"facts": ["a"]}),
        (FACTS, '{"facts": ["a", "b", "c", "d"]}', {"facts": ["a", "b", "c"]}),
        (EVENTS, '{"memory": {"Event": "add", "n": "3", "why": "new"}}', {"memory": [{"event": "ADD", "n": 3}]}),
        (GRADE, '{"score": "0.5", "fine": "Yes"}', {"score": 0.5, "fine": True}),
        (FACTS, '{"facts": null}', {"facts": []}),
        (FACTS, '{"facts": [3]}', {"facts": ["3"]}),
        (GRADE, '{"score": 2, "fine": false}', None),
    ],
)
def test_forms_are_read_with_tolerance(schema: Any, text: str, value: Any) -> None:
    if value is None:
        with pytest.raises(NotValid):
            read_value(text, schema)
    else:
        assert read_value(text, schema) == value
