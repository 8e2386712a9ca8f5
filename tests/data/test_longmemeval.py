import json

import pytest

from remind import read


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
LOST = "answer_lost"


@pytest.mark.parametrize(
    ("changes", "evidence", "lost"),
    [
        # no flags: all turns of the gold sessions
        ({}, ("S2:T1", "S3:T1", "S3:T2"), [LOST]),
        # a gold turn without words is no evidence
        ({"haystack_sessions": [[SAID], [], [{**SAID, "content": "", "has_answer": True}]]}, ("S3:T1",), [LOST]),
    ],
)
def test_evidence(written, changes, evidence, lost):
    corpus = read(written("lme.json", INSTANCE | changes))
    assert corpus.questions[0].evidence == evidence
    assert [(x.question_id, x.reference) for x in corpus.dangling] == [("q1", reference) for reference in lost]
    assert corpus.references == len(evidence) + len(lost)
