"""One change to a good file of each JSON format, and the line it is refused with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fuzzing import seeds
from fuzzing.seeds import changed

from remind import read
from remind.core.errors import DataError

_CONTEXT, _QUESTION = seeds.REFMEM
_SESSION = _CONTEXT["sessions"][0]
_TALK = "0.conversation"
_TURN = "0.sessions.0.turns.0"


@pytest.mark.parametrize(
    ("format", "path", "value", "message"),
    [
        ("locomo", "1.sample_id", "", "[item 2]: sample_id is missing or blank"),
        ("locomo", "1.sample_id", "s1", "[s1]: dialogue id 's1' occurs twice, first in "),
        ("locomo", f"{_TALK}.session_1.0.speaker", ..., "[s1, session_1, D1:1]: speaker is missing or blank"),
        ("locomo", f"{_TALK}.session_1.0.dia_id", None, "[s1, session_1]: dia_id is missing or blank"),
        ("locomo", f"{_TALK}.session_2", {}, "[s1]: session_2 should be a list, not an object"),
        ("locomo", f"{_TALK}.Session_01", [], "[s1]: the keys 'session_1' and 'Session_01' name the same"),
        ("locomo", f"{_TALK}.session_1_date_time", 7, "[s1]: session_1_date_time should be text, not a number"),
        ("locomo", f"{_TALK}.session_1_date_time", "9:00 am on 31 February, 2023", "[s1]: the time of session 'S1'"),
        ("locomo", "0.qa.0.category", "4", "[s1-q000]: category should be a whole number, not '4'"),
        ("locomo", "0.qa.0.answer", ["a"], "[s1-q000]: answer should be text, not a list"),
        ("locomo", "0.qa.0.answer", "", "[s1-q000]: a gold answer is blank"),
        ("realtalk", "session_1.1.dia_id", "D1:1", "[session_1, D1:1]: turn id 'D1:1' occurs twice"),
        ("realtalk", "session_1.0.speaker", None, "[session_1, D1:1]: speaker is missing or blank"),
        ("realtalk", "session_1.1.img_file", "a.jpg", "[session_1, D1:2]: img_file should be a list, not text"),
        ("longmemeval", "0.question_id", None, "[item 1]: question_id is missing or blank"),
        ("longmemeval", "0.haystack_dates", [], "[item 1, q1]: 2 sessions, 2 session ids and 0 dates: must be equal"),
        ("longmemeval", "0.haystack_sessions.1.0.role", "", "[item 1, q1, S1:T1]: speaker is missing or blank"),
        ("longmemeval", "0.question_date", "2023/13/20", "[item 1, q1]: question_date '2023-13-20' is not a valid"),
        ("msc", "1", [], "[item 2]: a row should be an object, not a list"),
        ("msc", "1.dialog", "x", "[item 2]: dialog should be a list, not text"),
        ("msc", "1.dialog.0.text", 3, "[item 2, S2:T1]: text should be text, not a number"),
        ("dialogcc", "1", seeds.DIALOGCC[0], "[item 2, d1]: dialogue id 'd1' occurs twice, first in "),
        ("dialogcc", "0.dialogue.0.shared_image", [3], "[item 1, d1, S1:T1]: a shared image should be an object"),
        ("dialogcc", "0.dialogue.0.shared_image", "../x", "[item 1, d1, S1:T1]: image '../x' is outside the data"),
        ("chat", "1", [1], "[item 2]: a line should be an object, not a list"),
        ("chat", "1.speaker", ..., "[item 2]: speaker is missing or blank"),
        ("chat", "1.speaker", ["Ana"], "[item 2]: speaker should be text, not a list"),
        ("chat", "1.time", "2024-02-30", "[item 2]: time '2024-02-30' is not a valid date"),
        ("chat", "1.time", "2024-02-03T25:00:00Z", "[item 2]: time '2024-02-03T25:00:00Z' is not a valid date"),
        ("chat", "1.images", [{}], "[item 2]: an image without path, url, source or caption"),
        ("chat", "2.id", "S1:T1", "[item 3]: turn id 'S1:T1' occurs twice"),
        ("chat", "2.dialogue", "a", "[a]: dialogue id 'a' occurs twice, first in "),
        ("chat", "3", {"id": "b", "messages": []}, "[item 4]: dialogue id 'b' occurs twice"),
        ("chat", "0.messages", [{"role": "user"}], "[item 1, a]: the dialogue has no turns"),
        ("chat", "0.messages.0.content", [{"type": "audio"}], "[item 1, a, turn 1]: content part of type 'audio'"),
        ("chat", "0.messages.0.content", [{"type": "text"}], "[item 1, a, turn 1]: a text part should be text, not"),
        ("chat", "0.questions", {"text": "?"}, "[item 1]: questions should be a list, not an object"),
        ("chat", "0.questions", [{"answers": []}], "[item 1, a-q000]: question is missing or blank"),
        ("chat", "0.questions", [{"text": "?", "split": "x"}], "[item 1, a-q000]: unknown split 'x'; known: train,"),
        ("chat", "0.questions", [{"text": "?", "options": ["x"], "answers": "y"}], "[item 1, a-q000]: answer 'y' is"),
        ("refmem", "2", {"type": "answer"}, "[item 3]: unknown record type 'answer'; known: context, question"),
        ("refmem", "2", _CONTEXT, "[item 3, c1]: dialogue id 'c1' occurs twice, first in "),
        ("refmem", "2", _QUESTION, "[item 3, q1]: question id 'q1' occurs twice"),
        ("refmem", "0.sessions.1", _SESSION, "[item 1, c1]: session id 's1' occurs twice"),
        ("refmem", f"{_TURN}.id", "t2", "[item 1, c1, t2]: turn id 't2' occurs twice"),
        ("refmem", f"{_TURN}.time", "2024-02-30 10:00", "[item 1, c1, t1]: time '2024-02-30 10:00' is not a valid"),
        ("refmem", f"{_TURN}.images", [{"path": "../x"}], "[item 1, c1, t1]: image '../x' is outside the data folder"),
        ("refmem", "1.context_id", "c2", "[item 2]: its dialogue 'c2' is missing"),
        ("refmem", "1.format", "open", "[item 2, q1]: unknown question format 'open'; known: single, multi, direct"),
        ("refmem", "1.format", "direct", "[item 2, q1]: a direct question has no options"),
        ("refmem", "1.answers", ["D"], "[item 2, q1]: answer 'D' is not the letter of an option (A to B)"),
        ("refmem", "1.answers", ["A", "A"], "[item 2, q1]: an answer occurs twice"),
        ("refmem", "1", _QUESTION | {"format": "single", "answers": ["A", "B"]}, "[item 2, q1]: a single question has"),
        ("refmem", "1", _QUESTION | {"format": "direct", "options": [], "answers": [" "]}, "[item 2, q1]: a gold"),
        ("refmem", "1.options", [], "[item 2, q1]: a multi question needs 1 to 26 options, not 0"),
        ("refmem", "1.options", ["one", " "], "[item 2, q1]: an option is blank or occurs twice"),
        ("refmem", "1.options", ["two words", " two\nwords"], "[item 2, q1]: an option is blank or occurs twice"),
        ("refmem", "1.images", [10**4000], f"[item 2, q1]: image index 1{'0' * 37}...{'0' * 39} is out of range"),
        ("refmem", "1.dimension", "vibes", "[item 2, q1]: unknown dimension 'vibes'"),
        ("refmem", "1.split", "valid", "[item 2, q1]: unknown split 'valid'; known: train, dev, test"),
        ("refmem", "1.category", 1.5, "[item 2, q1]: category should be text or a whole number"),
        ("refmem", "1.time", "2023-02-29", "[item 2, q1]: time '2023-02-29' is not a valid date or time of day"),
        ("shaped", "data", 3, ": dialogue should be a list, not a number"),
        ("shaped", "data.0.parts", ..., "[dialogue 1, c1]: no 'parts' among 'conv', 'qa'; where it may be missing"),
        ("shaped", "data.0.parts.1.says.0", {}, "[dialogue 1, c1, session 2, turn 1]: no 'who' among no keys"),
        ("shaped", "data.0.parts.1.says.0.what", 3, "[dialogue 1, c1, 2:T1]: text should be text, not a number"),
        ("shaped", "data.0.parts.1.no", 1, "[dialogue 1, c1]: session id '1' occurs twice"),
        ("shaped", "data.0.qa.0.gold", 2, "[dialogue 1, c1, question 1, c1-q000, answer 1]: answer 2 is not the"),
        ("shaped", "data.0.qa.0.pics", 1, "[dialogue 1, c1, question 1, c1-q000]: image index 1 is out of range"),
        ("shaped", "data.0.qa.0.ev", [[1]], "[dialogue 1, c1, question 1, c1-q000, evidence 1]: no '1' among no keys"),
    ],
)
def test_a_bad_record_is_one_line(tmp_path: Path, format: str, path: str, value: Any, message: str) -> None:
    file, mapping = tmp_path / "x.json", tmp_path / "mapping.yaml"
    file.write_text(json.dumps(changed(getattr(seeds, format.upper()), path, value)), encoding="utf-8")
    mapping.write_text(seeds.MAPPING, encoding="utf-8")
    name = str(mapping) if format == "shaped" else format
    with pytest.raises(DataError) as caught:
        read(file, name)
    error = str(caught.value)
    assert error.removeprefix(str(file)).lstrip().startswith(message)
    assert "\n" not in error
    assert len(error) < 500 + len(str(file))
