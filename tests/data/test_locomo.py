import json
import re

import pytest

from remind import read
from remind.data.dialogue import NO_INFORMATION, Dangling


@pytest.fixture(scope="module")
def dev(remind_data):
    return read(remind_data / "locomo" / "locomo_dev.json")


def test_turns_and_questions_are_those_of_the_file(dev, remind_data):
    """Brute force: turns verbatim and in order, answers, and references that are turn ids letter for letter."""
    raw = json.loads((remind_data / "locomo" / "locomo_dev.json").read_text(encoding="utf-8"))
    for sample, (dialogue, questions) in zip(raw, dev.by_dialogue(), strict=True):
        assert dialogue.id == sample["sample_id"]
        numbers = sorted(int(k[8:]) for k in sample["conversation"] if re.fullmatch(r"session_\d+", k))
        turns = [turn for number in numbers for turn in sample["conversation"][f"session_{number}"]]
        expected = [(t["dia_id"], t["speaker"], t["text"]) for t in turns]
        assert [(t.id, t.speaker, t.text) for t in dialogue.turns] == expected
        captions = [t["blip_caption"] for t in turns if t.get("blip_caption") or t.get("img_url")]
        assert [image.caption for image in dialogue.images] == captions
        ids = {turn["dia_id"] for turn in turns}
        for question, item in zip(questions, sample["qa"], strict=True):
            # the adversarial answer is never given
            assert question.answers == ((NO_INFORMATION,) if item["category"] == 5 else (str(item["answer"]),))
            plain = [reference for reference in item["evidence"] if reference in ids]
            assert set(plain) <= set(question.evidence)
            if len(plain) == len(item["evidence"]):
                assert list(question.evidence) == list(dict.fromkeys(plain))
    lost = [(lost.question_id.split("-q")[0], lost.reference) for lost in dev.dangling]
    assert (dev.references, lost) == (1728, [("conv-42", "D10:19"), ("conv-42", "D")])
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d", s.time) for d in dev.dialogues for s in d.sessions)


def turn(turn_id, text="hm", speaker="Ana", **fields):
    return {"speaker": speaker, "dia_id": turn_id, "text": text, **fields}


def sample(conversation, qa):
    return {"sample_id": "conv-1", "conversation": conversation, "qa": qa}


def test_schema_corners(written):
    pictures = turn("D1:2", "", "Ben", img_url=["http://x/1", "http://x/2"], blip_caption="c")
    conversation = {"session_1": [turn("D1:1", "look", blip_caption="a cat"), pictures]}
    qa = [
        {"question": "how many?", "answer": 3, "evidence": ["D1:1; D1:2"], "category": 4},
        {"question": "why?", "adversarial_answer": "wrong", "answer": "wrong too", "evidence": [], "category": 5},
        {"question": "none?", "category": 1, "evidence": "D1:9"},
    ]
    corpus = read(written("locomo.json", sample(conversation, qa)))
    expected = [("a cat", None), ("c", "http://x/1"), (None, "http://x/2")]
    assert [(image.caption, image.source) for image in corpus.dialogues[0].images] == expected
    assert [q.answers for q in corpus.questions] == [("3",), (NO_INFORMATION,), ()]
    assert corpus.questions[0].evidence == ("D1:1", "D1:2")
    assert (corpus.references, corpus.dangling) == (3, (Dangling("conv-1-q002", "D1:9"),))


def test_the_order_is_that_of_the_numbers_whatever_the_times_are(written):
    """Words for times, keys in any order and spelling, and annotations of sessions beside them."""
    conversation = {
        "session_10": [turn("D10:1")],
        "session_2_date_time": "12 June 2023",
        "session 2": [turn("D2:1"), turn("D2:2", " "), turn("D2:3", None)],
        "SESSION_1_Date_Time": "8 May 2023",
        "Session_1 ": [turn("D1:1")],
    }
    qa = [{"question": "?", "category": 1, "evidence": ["D2:1", "D2:2"]}]
    corpus = read(written("locomo.json", sample(conversation, qa)))
    assert [(s.id, s.time, [t.id for t in s.turns]) for s in corpus.dialogues[0].sessions] == [
        ("S1", "8 May 2023", ["D1:1"]),
        ("S2", "12 June 2023", ["D2:1"]),
        ("S10", None, ["D10:1"]),
    ]
    # two turns without words are left out; what rests on one dangles
    assert (corpus.blank, corpus.references, corpus.dangling) == (2, 2, (Dangling("conv-1-q000", "D2:2"),))
