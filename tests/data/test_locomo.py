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
    """Words for times; several images in a turn; a turn without words, on which evidence rests."""
    said = {"speaker": "Ana", "text": "hm"}
    pictures = {"img_url": ["http://x/1", "http://x/2"], "blip_caption": "c"}
    conversation = {
        "session_10": [said | {"dia_id": "D10:1", "text": ""} | pictures],
        "session_2": [said | {"dia_id": "D2:1"}, said | {"dia_id": "D2:2", "text": " "}],
        "session_2_date_time": "12 June 2023",
    }
    qa = [{"question": "?", "category": 1, "evidence": "D2:1; D2:2"}]
    corpus = read(written("locomo.json", {"sample_id": "conv-1", "conversation": conversation, "qa": qa}))
    (dialogue,), (question,) = corpus.dialogues, corpus.questions
    assert [(s.id, s.time) for s in dialogue.sessions] == [("S2", "12 June 2023"), ("S10", None)]
    images = [(image.caption, image.source) for image in dialogue.images]
    assert images == [("c", "http://x/1"), (None, "http://x/2")]
    assert (question.answers, question.evidence, corpus.blank) == ((), ("D2:1",), 1)
    assert (corpus.references, corpus.dangling) == (2, (Dangling("conv-1-q000", "D2:2"),))
