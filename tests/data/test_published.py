"""Published corpora against their own files, by brute force, and the oddities that these have."""

import ast
import csv
import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remind import read
from remind.data.dialogue import NO_INFORMATION, Dangling
from remind.data.readers.builder import Place, Resolved
from remind.data.readers.locomo import resolve


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


IDS = {f"D{session}:{turn}" for session in range(1, 31) for turn in range(1, 41)}
PLACE = Place(Path("x.json"))


@pytest.mark.parametrize(
    ("references", "turns", "dangling"),
    [
        (["['D1:3', 'D2:4']"], "D1:3 D2:4", ()),
        (["D1:3; D99:1", 7], "D1:3", ("D99:1", "7")),
        (["D1:39-42", "D"], "D1:39", ("42", "D")),
    ],
)
def test_dirty_references(references, turns, dangling):
    expected = turns.split()
    assert resolve(PLACE, references, IDS) == Resolved(tuple(expected), dangling, len(expected) + len(dangling))


def _forms(session, turn):
    forms = ("D{0}:{1}", "D{0}:{1:02d}", "D:{0}:{1}", "D{0};{1}", "d{0} : {1}")
    return st.sampled_from([form.format(session, turn) for form in forms])


@given(st.data())
def test_references_joined_by_any_separator(data):
    """Reference: what was written down before it was made dirty."""
    numbers = data.draw(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=6))
    pieces = [data.draw(_forms(*number)) for number in numbers]
    separator = data.draw(st.sampled_from(["; ", ", ", " ", ". ", " and ", " / ", "\n"]))
    expected = [f"D{session}:{turn}" for session, turn in numbers]
    assert resolve(PLACE, [separator.join(pieces)], IDS) == Resolved(tuple(dict.fromkeys(expected)), (), len(expected))


def test_turns_and_evidence_are_those_of_the_files(remind_data):
    """Brute force: a turn belongs to the session that lists it; a dangling reference names no turn of its chat."""
    dev, misnumbered = read(remind_data / "realtalk"), 0
    for dialogue in dev.dialogues:
        raw = json.loads((remind_data / "realtalk" / f"{dialogue.id}.json").read_text(encoding="utf-8"))
        ids = {t["dia_id"] for k, v in raw.items() if re.fullmatch(r"session_\d+", k) for t in v}
        lost = {x.reference for x in dev.dangling if x.question_id.startswith(f"{dialogue.id}-q")}
        assert not lost & ids
        assert all(re.fullmatch(r"D\d+:\d+", reference) for reference in lost)
        for session in dialogue.sessions:
            listed = raw[f"session_{session.id[1:]}"]
            expected = [(t["dia_id"], t["speaker"], t["clean_text"]) for t in listed]
            assert [(t.id, t.speaker, t.text) for t in session.turns] == expected
            misnumbered += sum(turn.id.split(":")[0] != f"D{session.id[1:]}" for turn in session.turns)
    assert misnumbered == 369 + 243 + 374 + 344


def test_a_real_instance(remind_data):
    path = remind_data / "longmemeval" / "longmemeval_single.json"
    single = read(path)
    (dialogue,), (question,) = single.dialogues, single.questions
    assert (len(dialogue.sessions), len(dialogue.turns)) == (53, 550)
    assert (question.id, question.dialogue_id, question.category) == ("e47becba", "e47becba", "single-session-user")
    assert (question.answers, question.time) == (("Business Administration",), "2023-05-30T23:40")
    raw = json.loads(path.read_text(encoding="utf-8"))[0]
    flagged = [t["content"] for s in raw["haystack_sessions"] for t in s if t.get("has_answer")]
    assert [dialogue.turn(turn_id).text for turn_id in question.evidence] == flagged
    assert [s.id for s in dialogue.sessions] == [f"S{n}" for n in range(1, 54)]
    times = [s.time for s in dialogue.sessions]
    assert times == sorted(times)


SAID = {"role": "user", "content": "hm"}
INSTANCE = {
    "question_id": "q1",
    "question": "How many?",
    "answer": 3,
    "haystack_dates": ["2023/05/03 (Wed) 10:00", "2023/05/01 (Mon) 10:00", "2023/05/02 (Tue) 10:00"],
    "haystack_session_ids": ["answer_b", "filler", "answer_a"],
    "haystack_sessions": [[SAID, SAID], [], [{**SAID, "has_answer": False}]],
    "answer_session_ids": ["answer_a", "answer_b", "answer_lost"],
}


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        # no flags: all turns of the gold sessions
        ({}, ("S2:T1", "S3:T1", "S3:T2")),
        # a gold turn without words is no evidence
        ({"haystack_sessions": [[SAID], [], [{**SAID, "content": "", "has_answer": True}]]}, ("S3:T1",)),
    ],
)
def test_evidence(written, changes, evidence):
    corpus = read(written("lme.json", INSTANCE | changes))
    assert corpus.questions[0].evidence == evidence
    assert [(x.question_id, x.reference) for x in corpus.dangling] == [("q1", "answer_lost")]
    assert corpus.references == len(evidence) + 1


def test_a_row_is_a_dialogue(remind_data):
    name = "session_3_valid"
    path = remind_data / "msc" / f"{name}.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row, dialogue in zip(rows, read(path).dialogues, strict=True):
        assert dialogue.id == f"{name}-{row['metadata']['initial_data_id']}"
        parts = [*row["previous_dialogs"], row]
        assert len(dialogue.sessions) == len(parts) == 3
        for session, part in zip(dialogue.sessions, parts, strict=True):
            assert [turn.text for turn in session.turns] == [turn["text"] for turn in part["dialog"]]
            assert all(a.speaker != b.speaker for a, b in zip(session.turns, session.turns[1:], strict=False))
        assert dialogue.sessions[-1].time is None
        assert dialogue.sessions[0].time == row["previous_dialogs"][0]["time_back"].strip()


HEADER = "Utterance,Speaker,Emotion,Scene_ID,Utterance_ID,Season,Episode,Start_Time,End_Time\n"


def test_seasons_are_the_episodes_of_all_files_in_order(remind_data):
    folder = remind_data / "friends" / "emorynlp_csv"
    rows = []
    for path in folder.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            rows += csv.DictReader(file)
    corpus = read(folder, "friends_seasons")
    assert [dialogue.id for dialogue in corpus.dialogues] == ["s01", "s02", "s03", "s04"]
    for season, dialogue in enumerate(corpus.dialogues, start=1):
        # stable: rows of an episode stay in the order of their file
        own = sorted((r for r in rows if int(r["Season"]) == season), key=lambda r: int(r["Episode"]))
        ids = [f"s{season:02}e{int(r['Episode']):02}:S{r['Scene_ID']}:T{r['Utterance_ID']}" for r in own]
        assert [(t.id, t.text, t.speaker) for t in dialogue.turns] == [
            (name, r["Utterance"], " & ".join(ast.literal_eval(r["Speaker"]))) for name, r in zip(ids, own, strict=True)
        ]
    assert len(read(folder).dialogues) == 77 + 11 + 9  # episodes


def test_a_bad_row_is_named(tmp_path, refused):
    path = tmp_path / "friends.csv"
    path.write_text(
        HEADER + 'Hi,Monica,Neutral,1,1,1,2,0,1\n"Hi","[\'a\', [b]]",Neutral,1,2,1,2,0,1\n', encoding="utf-8"
    )
    assert refused(path).startswith("[line 3]: the speaker \"['a', [b]]\" is not a list of names")
