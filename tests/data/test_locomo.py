import json
import re

from remind import read
from remind.data.dialogue import NO_INFORMATION, Dangling


def test_turns_and_questions_are_those_of_the_file(remind_data):
    """Brute force: turns verbatim and in order, answers, and references that are turn ids letter for letter."""
    path = remind_data / "locomo" / "locomo_dev.json"
    dev, raw = read(path), json.loads(path.read_text(encoding="utf-8"))
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


def test_the_order_is_that_of_the_numbers_whatever_the_times_are(written):
    """Words for times, keys in any order and spelling; several images in a turn."""

    def turn(turn_id, text="hm", **fields):
        return {"speaker": "Ana", "dia_id": turn_id, "text": text, **fields}

    pictures = {"img_url": ["http://x/1", "http://x/2"], "blip_caption": "c"}
    conversation = {
        "session_10": [turn("D10:1", "look", blip_caption="a cat"), turn("D10:2", "", **pictures)],
        "session_2_date_time": "12 June 2023",
        "session 2": [turn("D2:1"), turn("D2:2", " "), turn("D2:3", None)],
        "SESSION_1_Date_Time": "8 May 2023",
        "Session_1 ": [turn("D1:1")],
    }
    qa = [{"question": "?", "category": 1, "evidence": "D2:1; D2:2"}]
    corpus = read(written("locomo.json", {"sample_id": "conv-1", "conversation": conversation, "qa": qa}))
    (dialogue,), (question,) = corpus.dialogues, corpus.questions
    assert [(s.id, s.time, [t.id for t in s.turns]) for s in dialogue.sessions] == [
        ("S1", "8 May 2023", ["D1:1"]),
        ("S2", "12 June 2023", ["D2:1"]),
        ("S10", None, ["D10:1", "D10:2"]),
    ]
    images = [("a cat", None), ("c", "http://x/1"), (None, "http://x/2")]
    assert [(image.caption, image.source) for image in dialogue.images] == images
    # two turns without words are left out; what rests on one dangles
    assert (question.answers, question.evidence) == ((), ("D2:1",))
    assert (corpus.blank, corpus.references, corpus.dangling) == (2, 2, (Dangling("conv-1-q000", "D2:2"),))
