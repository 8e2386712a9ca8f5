"""Table 2 by hand."""

from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.refmem.statistics import as_markdown, statistics

TURNS = (Turn("1", "Ana", "one two three", images=(Image(0), Image(1))), Turn("2", "Bo", "four"))
LATER = (Turn("3", "Ana", "five  six"),)
DIALOGUES = (
    Dialogue("a", (Session("1", None, TURNS), Session("2", None, LATER))),
    Dialogue("b", (Session("1", None, (Turn("1", "Cy", "a b c d"),)),)),
)
OPTIONS = ("w", "x", "y", "z")
BELIEF = "belief_modeling"
QUESTIONS = (
    Question("q1", "a", "?", "single", OPTIONS, ("B",), ("1", "3"), (), BELIEF, split="train"),
    Question("q2", "a", "?", "multi", OPTIONS, ("A", "C", "D"), ("2",), (), BELIEF, split="test"),
    Question("q3", "a", "?", "direct", (), ("m", "n"), ("1",), (0, 1), "cross_modal_latent_inference", split="test"),
)
TALK = Corpus(DIALOGUES, QUESTIONS)


def test_the_counts_are_those_of_a_hand() -> None:
    counts = statistics(TALK, 5)
    talk, questions = counts["conversations"], counts["questions"]
    names = ("contexts", "sessions", "segments", "turns", "images", "words")
    assert [talk[name] for name in names] == [2, 3, 5, 4, 2, 10]
    assert [talk[name] for name in ("turns_per_session", "words_per_turn", "images_per_context")] == [1.3333, 2.5, 1.0]
    assert questions["total"] == 3
    assert questions["by_format"] == {"single": 1, "multi": 1, "direct": 1}
    assert (questions["by_dimension"][BELIEF], questions["by_dimension"]["pattern_induction"]) == (2, 0)
    assert questions["by_split"] == {"test": 2, "train": 1}
    per_item = ("options_per_item", "answer_cardinality", "anchors_per_item")
    assert [questions[name] for name in per_item] == [4.0, 2.0, 2.0]
    assert questions["answer_cardinality_by_format"] == {"single": 1.0, "multi": 3.0, "direct": 2.0}
    assert questions["letters_of_single"] == {"B": 1}


def test_the_page_tells_them() -> None:
    filters = {"in": 9, "kept": 3, "removed": {"leak": 4, "near_duplicate": 2}}
    lines = as_markdown(statistics(TALK, 5), filters).splitlines()
    assert {
        "| Turns | 4 |",
        "| Belief modeling | 2 (66.7%) | 1 | 1 | 0 |",
        "| Evidence anchors per item | 2.00 |",
        "| removed: near duplicate | 2 |",
    } <= set(lines)
    assert all(line.endswith("|") for line in lines if line.startswith("|"))
    # a corpus without questions has a page too
    assert "| Total | 0 |" in as_markdown(statistics(Corpus(DIALOGUES), 0))
