"""A small valid file of every format, for mutations to start from."""

from __future__ import annotations

import json
import pickle
from typing import Any

_TURNS = [
    {"speaker": "Ana", "dia_id": "D1:1", "text": "We went to the lake.", "blip_caption": "a lake", "img_url": ["u"]},
    {"speaker": "Ben", "dia_id": "D1:2", "text": "Which one?"},
]
_TALK = {"speaker_a": "Ana", "speaker_b": "Ben", "session_1_date_time": "1:56 pm on 8 May, 2023", "session_1": _TURNS}
_TALK |= {"session_2": [{"speaker": "Ana", "dia_id": "D2:1", "text": "The blue one."}]}
_QA = [
    {"question": "Where?", "answer": "the lake", "evidence": ["D1:1; D2:1", "D1:1-2"], "category": 4},
    {"question": "Why?", "adversarial_answer": "no", "evidence": [], "category": 5},
]
LOCOMO = [{"sample_id": name, "conversation": _TALK, "qa": _QA} for name in ("s1", "s2")]
_SAID = [
    {"clean_text": "hi", "speaker": "Emi", "date_time": "29.12.2023, 22:42:04", "dia_id": "D1:1"},
    {"clean_text": "", "speaker": "Kim", "dia_id": "D1:2", "img_file": ["a.jpg", "a_opt.jpg"], "blip_caption": "c"},
]
REALTALK = {"name": {}, "session_1_date_time": "29.12.2023", "session_1": _SAID}
REALTALK |= {"qa": [{"question": "Who?", "answer": 3, "evidence": ["D1:1, 2"], "category": 1}]}
_HAYSTACK = [
    [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
    [{"role": "user", "content": "I like tea", "has_answer": True}],
]
_ASKED = {"question_id": "q1", "question_type": "multi-session", "question": "What?", "answer": "tea"}
_ASKED |= {"question_date": "2023/05/30 (Tue) 23:40", "haystack_session_ids": ["a", "answer_b"]}
_ASKED |= {"haystack_dates": ["2023/05/20 (Sat) 02:21", "2023/05/19 (Fri) 02:21"], "haystack_sessions": _HAYSTACK}
LONGMEMEVAL = [{**_ASKED, "answer_session_ids": ["answer_b"]}]
_QUESTION = {"id": "q1", "context_id": "c1", "question": "Which?", "format": "multi", "options": ["one", "two"]}
_QUESTION |= {"answers": ["A"], "evidence": ["t1"], "images": [0], "dimension": "pattern_induction"}
_SPOKEN = [
    {"id": "t1", "speaker": "Ana", "text": "hi"},
    {"id": "t2", "speaker": "Ben", "text": "", "images": [{"path": None, "caption": "a", "source": "b"}]},
]
REFMEM = [
    {"type": "context", "id": "c1", "sessions": [{"id": "s1", "time": "2024-03-01", "turns": _SPOKEN}]},
    {"type": "question", **_QUESTION, "split": "train", "category": None, "time": None},
]
_EARLIER = {"dialog": [{"text": "a"}, {"text": "b"}], "time_back": "1 day"}
_NOW = [{"text": "hi", "id": "Speaker 1"}, {"text": "ho", "id": "Speaker 2"}]
MSC = [{"dialog": _NOW, "previous_dialogs": [_EARLIER], "metadata": {"initial_data_id": "x_1"}}] * 2
_SHOWN = [
    {"utterance": "look", "speaker": "A", "shared_image": [{"image_url": "http://e.org/x", "caption": "x"}]},
    {"utterance": "nice", "speaker": "B", "shared_image": [], "description": "d"},
]
DIALOGCC = [{"dialogue_id": "d1", "dialogue": _SHOWN}]
_ASKED_IN = {"questions": {"default": "Who paints?"}, "options": ["Ana", "Ben", "I don't know."], "answer": "ana"}
_SCENE = {"date": "March 1, 1994", "script": "Ana: I paint.\nAll day.\nBen: Nice.", "hard_q": {"past": [_ASKED_IN]}}
DIALSIM = {"S01E01": {1: _SCENE | {"easy_q": {"ans_w_time": {7: _ASKED_IN}, "before_event_unans": {8: _ASKED_IN}}}}}
_REMEMBERED: dict[str, Any] = {"profile": {"Age": 28}, "social_relationship": "{}"}
_REMEMBERED |= {"events": {"1_0_0": {"content": "They met.", "Creation Time": "May 2022"}}}
_REMEMBERED |= {"dialogues": {"1_0_0#1": {"events": "1_0_0", "contents": {"2022-05-12 10:00": ["Ana: hi", "Ben: ho"]}}}}
_ON_MEMORY = {"Question": "When?", "Answer": "In May.", "Reference Memory": "['1_0_0#1', '9']", "Memory Anchors": []}
_ON_PROFILE = _ON_MEMORY | {"Reference Memory": "Age"}
_ABOUT = {"profile": [_ON_PROFILE], "social_relationship": [], "events": [], "dialogues": [{"1_0_0#1": [_ON_MEMORY]}]}
PERLTQA = [{"Ana": _REMEMBERED}, {"Ana": _ABOUT}]
CHAT = [
    {"id": "a", "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    {"speaker": "Ana", "text": "one", "session": "S1", "dialogue": "b", "images": ["https://e.org/a.png"]},
    {"speaker": "Ben", "text": "two", "time": "2024-01-01", "dialogue": "b", "images": [{"caption": "c"}]},
]
FRIENDS = (
    "Utterance,Speaker,Scene_ID,Utterance_ID,Season,Episode,Start_Time\n"
    '"Hi, all.","[\'Monica Geller\']",1,1,1,1,"00:01"\n'
    "Hey,\"['Ross Geller', 'Joey']\",1,2,1,1,\n"
    "Bye,Rachel,1,1,1,2,\n"
)
_PARTS = [
    {"no": 1, "date": "2024-03-01", "says": [{"who": "Ana", "what": "hi", "pics": [{"alt": "a"}]}]},
    {"no": 2, "date": None, "says": [{"who": "Ben", "what": "ho"}, {"who": "Ana", "what": "hm"}]},
]
_CHOICE = {"ask": "Which?", "kind": "SC", "of": ["one", "two"], "gold": 1, "ev": [[1, 0]], "pics": [0], "in": "x"}
_SEVERAL = {"ask": "All?", "kind": "MC", "of": {"A": "1", "B": 2}, "gold": [0, 1], "ev": [[2, 1], [9, 9]], "pics": 0}
_OPEN = {"ask": "Why?", "kind": "open", "gold": ["so", 5], "ev": [], "pics": None}
SHAPED = {"data": [{"conv": "c1", "parts": _PARTS, "qa": [_CHOICE, _SEVERAL, _OPEN]}]}
MAPPING = """\
dialogue: {records: data, id: conv, sessions: parts, questions: qa}
session: {id: no, time: date, turns: says}
turn: {speaker: who, text: what, images: "pics?"}
image: {caption: alt}
question: {text: ask, format: kind, options: "of?", answers: gold, evidence: ev, images: pics, split: "in?"}
answer: {index: .}
evidence: {session: 0, turn: 1}
values: {format: {SC: single, MC: multi, open: direct}, split: {x: train}}
"""


def changed(content: Any, path: str, value: Any) -> Any:
    """A copy of JSON with another value at a dotted path; `...` removes it, one place behind a list's end is added."""
    copy = inner = json.loads(json.dumps(content))
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in keys:
        inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
    if value is ...:
        del inner[last]
    elif isinstance(inner, list) and last == len(inner):
        inner.append(value)
    else:
        inner[last] = value
    return copy


def as_list(value: Any) -> bytes:
    return json.dumps(value, indent=1).encode()


def as_lines(values: list[Any]) -> bytes:
    return "".join(json.dumps(value) + "\n" for value in values).encode()


#: Formats that are no JSON.
CSV = ("friends", "friends_seasons", "dialsim")
#: Valid files by format.
FILES: dict[str, tuple[bytes, ...]] = {
    "refmem": (as_lines(REFMEM), as_list(REFMEM), as_lines(REFMEM[::-1])),
    "locomo": (as_list(LOCOMO), as_lines(LOCOMO)),
    "longmemeval": (as_list(LONGMEMEVAL),),
    "realtalk": (as_list(REALTALK),),
    "msc": (as_lines(MSC),),
    "dialogcc": (as_list(DIALOGCC), as_lines(DIALOGCC)),
    "dialsim": (pickle.dumps(DIALSIM),),
    "perltqa": (as_list(PERLTQA),),
    "friends_seasons": (FRIENDS.encode(),),
    "friends": (FRIENDS.encode(), FRIENDS.replace("\n", "\r\n").encode()),
    "chat": (as_lines(CHAT), as_list(CHAT)),
}
