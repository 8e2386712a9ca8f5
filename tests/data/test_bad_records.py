"""One change to a good file of each JSON format, and the line it is refused with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import seeds
from fuzzing.seeds import changed

_TALK = "0.conversation"


@pytest.mark.parametrize(
    ("format", "path", "value", "message"),
    [
        ("locomo", "1.sample_id", "s1", "[s1]: dialogue id 's1' occurs twice, first in "),
        ("locomo", f"{_TALK}.session_1_date_time", "9:00 am on 31 February, 2023", "[s1]: the time of session 'S1'"),
        ("locomo", "0.qa.0.category", "4", "[s1-q000]: category should be a whole number, not '4'"),
        ("dialogcc", "0.dialogue.0.shared_image", "../x", "[item 1, d1, S1:T1]: image '../x' is outside the data"),
        ("refmem", "2", {"type": "answer"}, "[item 3]: unknown record type 'answer'; known: context, question"),
        ("refmem", "1.images", [10**4000], f"[item 2, q1]: image index 1{'0' * 37}...{'0' * 39} is out of range"),
        ("shaped", "data.0.parts", ..., "[dialogue 1, c1]: no 'parts' among 'conv', 'qa'; where it may be missing"),
        ("shaped", "data.0.qa.0.gold", 2, "[dialogue 1, c1, question 1, c1-q000, answer 1]: answer 2 is not the"),
    ],
)
def test_a_bad_record_is_one_line(
    tmp_path: Path, refused: Any, format: str, path: str, value: Any, message: str
) -> None:
    file, mapping = tmp_path / "x.json", tmp_path / "mapping.yaml"
    file.write_text(json.dumps(changed(getattr(seeds, format.upper()), path, value)), encoding="utf-8")
    mapping.write_text(seeds.MAPPING, encoding="utf-8")
    assert refused(file, str(mapping) if format == "shaped" else format).startswith(message)
