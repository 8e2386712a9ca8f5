import json

import pytest

from remind import read
from remind.core.errors import DataError, FormatError
from remind.data.readers.longmemeval import iso_time


@pytest.fixture(scope="module")
def single(remind_data):
    return read(remind_data / "longmemeval" / "longmemeval_single.json")


def test_known_counts(single):
    (dialogue,) = single.dialogues
    assert (len(dialogue.sessions), len(dialogue.turns)) == (53, 550)
    assert dialogue.speakers == ("user", "assistant")
    (question,) = single.questions
    assert (question.id, question.dialogue_id, question.category) == ("e47becba", "e47becba", "single-session-user")
    assert (question.answers, question.time) == (("Business Administration",), "2023-05-30T23:40")
    assert (single.references, single.dangling) == (2, ())


def test_evidence_is_where_the_file_flags_it(single, remind_data):
    raw = json.loads((remind_data / "longmemeval" / "longmemeval_single.json").read_text(encoding="utf-8"))[0]
    flagged = [t["content"] for s in raw["haystack_sessions"] for t in s if t.get("has_answer")]
    dialogue = single.dialogues[0]
    assert [dialogue.turn(turn_id).text for turn_id in single.questions[0].evidence] == flagged
    assert "Business Administration" in flagged[0]


def test_gold_session_ids_do_not_leak(single):
    dialogue = single.dialogues[0]
    names = [s.id for s in dialogue.sessions] + [t.id for t in dialogue.turns] + [dialogue.id]
    assert not any("answer" in name for name in names)
    assert [s.id for s in dialogue.sessions] == [f"S{n}" for n in range(1, 54)]
    times = [s.time for s in dialogue.sessions]
    assert times == sorted(times)
    assert times[0] == "2023-05-20T02:21"


def test_questions_without_haystacks_are_refused(remind_data):
    path = remind_data / "longmemeval" / "longmemeval_s_queries.json"
    for format in (None, "longmemeval"):
        with pytest.raises(FormatError, match="questions without haystacks") as caught:
            read(path, format=format)
        assert caught.value.path == path


def test_the_folder_reads_as_its_native_file(remind_data, single):
    assert read(remind_data / "longmemeval") == single


@pytest.mark.parametrize(
    ("words", "iso"),
    [
        ("2023/05/20 (Sat) 02:21", "2023-05-20T02:21"),
        ("2023/05/20", "2023-05-20"),
        ("2023/13/20 (Sat) 02:21", "2023/13/20 (Sat) 02:21"),
        ("in May", "in May"),
    ],
)
def test_times(words, iso):
    assert iso_time(words) == iso


def instance(**changes):
    return {
        "question_id": "q1",
        "question_type": "multi-session",
        "question": "How many?",
        "answer": 3,
        "question_date": "2023/06/01 (Thu) 10:00",
        "haystack_dates": ["2023/05/03 (Wed) 10:00", "2023/05/01 (Mon) 10:00", "2023/05/02 (Tue) 10:00"],
        "haystack_session_ids": ["answer_b", "filler", "answer_a"],
        "haystack_sessions": [
            [{"role": "user", "content": "b1"}, {"role": "assistant", "content": "b2"}],
            [],
            [{"role": "user", "content": "a1", "has_answer": False}],
        ],
        "answer_session_ids": ["answer_a", "answer_b", "answer_lost"],
        **changes,
    }


def write(folder, *instances):
    path = folder / "lme.json"
    path.write_text(json.dumps(list(instances)), encoding="utf-8")
    return path


def test_no_flag_means_all_turns_of_the_gold_sessions(tmp_path):
    corpus = read(write(tmp_path, instance()))
    (dialogue,), (question,) = corpus.dialogues, corpus.questions
    # in order of the dates; the empty session keeps its number
    assert [(s.id, s.time) for s in dialogue.sessions] == [("S2", "2023-05-02T10:00"), ("S3", "2023-05-03T10:00")]
    assert question.evidence == ("S2:T1", "S3:T1", "S3:T2")
    assert question.answers == ("3",)
    assert [lost.reference for lost in corpus.dangling] == ["answer_lost"]
    assert corpus.references == 4


def test_flags_win(tmp_path):
    sessions = instance()["haystack_sessions"]
    sessions[0][1]["has_answer"] = True
    corpus = read(write(tmp_path, instance(haystack_sessions=sessions, answer_session_ids=["answer_b"])))
    assert corpus.questions[0].evidence == ("S3:T2",)


def test_a_gold_session_without_turns_dangles(tmp_path):
    corpus = read(write(tmp_path, instance(answer_session_ids=["filler"])))
    assert corpus.questions[0].evidence == ()
    assert [(lost.question_id, lost.reference) for lost in corpus.dangling] == [("q1", "filler")]
    assert corpus.references == 1
    # an id of two sessions dangles only if both are empty
    twice = instance(haystack_session_ids=["answer_b", "answer_b", "answer_a"], answer_session_ids=["answer_b"])
    corpus = read(write(tmp_path, twice))
    assert (corpus.questions[0].evidence, corpus.dangling) == (("S3:T1", "S3:T2"), ())


def test_abstention(tmp_path):
    corpus = read(write(tmp_path, instance(question_id="q1_abs", answer="You did not say."), instance()))
    assert [q.id for q in corpus.questions] == ["q1_abs", "q1"]
    assert corpus.questions[0].answers == ("You did not say.",)
    assert len(corpus.dialogues) == 2


def test_words_for_dates_leave_the_order_alone(tmp_path):
    corpus = read(write(tmp_path, instance(haystack_dates=["later", "2023/05/01", "now"])))
    assert [s.time for s in corpus.dialogues[0].sessions] == ["later", "now"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"haystack_dates": []}, "[item 1, q1]: 3 sessions, 3 session ids and 0 dates: must be equal"),
        ({"haystack_sessions": [[], [], []]}, "[item 1, q1]: the dialogue has no turns"),
        ({"haystack_sessions": [[{"role": "user"}], [], []]}, "[item 1, q1, S3:T1]: text is missing or blank"),
        ({"haystack_sessions": [[{"content": "x"}], [], []]}, "[item 1, q1, S3:T1]: speaker is missing or blank"),
        ({"haystack_sessions": [["x"], [], []]}, "[item 1, q1, S3:T1]: a turn should be an object, not text"),
        ({"question": " "}, "[item 1, q1]: question is missing or blank"),
        ({"answer": " "}, "[item 1, q1]: a gold answer is blank"),
        ({"question_id": None}, "[item 1]: question_id is missing or blank"),
    ],
)
def test_bad_records_are_named(tmp_path, changes, message):
    path = write(tmp_path, instance(**changes))
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path} {message}")
