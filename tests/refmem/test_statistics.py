"""Table 2 by hand."""

from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.refmem.statistics import as_markdown, statistics

TALK = Corpus(
    (
        Dialogue(
            "a",
            (
                Session(
                    "1", None, (Turn("1", "Ana", "one two three", images=(Image(0), Image(1))), Turn("2", "Bo", "four"))
                ),
                Session("2", None, (Turn("3", "Ana", "five  six"),)),
            ),
        ),
        Dialogue("b", (Session("1", None, (Turn("1", "Cy", "a b c d"),)),)),
    ),
    (
        Question(
            "q1", "a", "?", "single", ("w", "x", "y", "z"), ("B",), ("1", "3"), (), "belief_modeling", split="train"
        ),
        Question(
            "q2", "a", "?", "multi", ("w", "x", "y", "z"), ("A", "C", "D"), ("2",), (), "belief_modeling", split="test"
        ),
        Question(
            "q3", "a", "?", "direct", (), ("m", "n"), ("1",), (0, 1), "cross_modal_latent_inference", split="test"
        ),
    ),
)


def test_the_counts_are_those_of_a_hand() -> None:
    told = statistics(TALK, 5)
    talk, asked = told["conversations"], told["questions"]
    assert [talk[key] for key in ("contexts", "sessions", "segments", "turns", "images", "words")] == [
        2,
        3,
        5,
        4,
        2,
        10,
    ]
    assert talk["turns_per_session"] == 1.3333
    assert (talk["words_per_turn"], talk["images_per_context"]) == (2.5, 1.0)
    assert asked["total"] == 3
    assert asked["by_format"] == {"single": 1, "multi": 1, "direct": 1}
    assert asked["by_dimension"]["belief_modeling"] == 2
    assert asked["by_dimension"]["pattern_induction"] == 0
    assert asked["by_split"] == {"test": 2, "train": 1}
    assert (asked["options_per_item"], asked["answer_cardinality"], asked["anchors_per_item"]) == (4.0, 2.0, 2.0)
    assert asked["answer_cardinality_by_format"] == {"single": 1.0, "multi": 3.0, "direct": 2.0}
    assert asked["letters_of_single"] == {"B": 1}


def test_the_page_tells_them() -> None:
    filters = {"in": 9, "kept": 3, "removed": {"leak": 4, "near_duplicate": 2}}
    page = as_markdown(statistics(TALK, 5), filters)
    for line in (
        "| Turns | 4 |",
        "| Belief modeling | 2 (66.7%) | 1 | 1 | 0 |",
        "| Evidence anchors per item | 2.00 |",
        "| removed: near duplicate | 2 |",
    ):
        assert line in page.splitlines()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert all(line.endswith("|") for line in rows)


def test_a_corpus_without_questions_has_a_page_too() -> None:
    page = as_markdown(statistics(Corpus(TALK.dialogues), 0))
    assert "| Total | 0 |" in page
