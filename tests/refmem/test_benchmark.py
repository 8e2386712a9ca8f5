"""The split, checked piece by piece, and the counts of Table 2 by hand."""

from __future__ import annotations

from random import Random

from refmem_samples import drafted, talk

from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.refmem.build import as_markdown, split, statistics
from remind.refmem.items import near_pairs

TALKS = Corpus((talk(), talk("chat", 1)))


def test_the_sides_share_nothing() -> None:
    seed, rng, items = 1, Random(1), []
    for number in range(60):
        dialogue = rng.choice(TALKS.dialogues)
        evidence: dict[str, object] = {"evidence": tuple(rng.sample([turn.id for turn in dialogue.turns], 2))}
        if number % 5 == 0:
            evidence = {"evidence": (), "images": (rng.randrange(len(dialogue.images)),)}
        question = f"What about {rng.randrange(400)} and {rng.randrange(400)}?"
        place = {"dialogue_id": dialogue.id, "cluster_id": f"{dialogue.id}/{rng.randrange(60)}"}
        items.append(drafted(f"{seed}-{number}", question=question, **place, **evidence))
    sides = split(items, TALKS, 0.2, seed, 0.85)
    held: dict[str, set[tuple[str, str]]] = {"train": set(), "test": set()}
    for one in items:
        images = [
            turn.id for turn in TALKS.dialogue(one.dialogue_id).turns for i in turn.images if i.index in one.images
        ]
        held[sides[one.id]] |= {(one.dialogue_id, turn) for turn in (*one.evidence, *images)} | {("", one.cluster_id)}
    assert not held["train"] & held["test"]
    assert all(sides[items[i].id] == sides[items[j].id] for i, j in near_pairs(items, 0.85))
    assert split(list(reversed(items)), TALKS, 0.2, seed, 0.85) == sides


def test_the_counts_are_those_of_a_hand() -> None:
    turns = (Turn("1", "Ana", "one two three", images=(Image(0), Image(1))), Turn("2", "Bo", "four"))
    later = (Turn("3", "Ana", "five  six"),)
    dialogues = (
        Dialogue("a", (Session("1", None, turns), Session("2", None, later))),
        Dialogue("b", (Session("1", None, (Turn("1", "Cy", "a b c d"),)),)),
    )
    options, belief, visual = ("w", "x", "y", "z"), "belief_modeling", "cross_modal_latent_inference"
    asked = (
        Question("q1", "a", "?", "single", options, ("B",), ("1", "3"), (), belief, split="train"),
        Question("q2", "a", "?", "multi", options, ("A", "C", "D"), ("2",), (), belief, split="test"),
        Question("q3", "a", "?", "direct", (), ("m", "n"), ("1",), (0, 1), visual, split="test"),
    )
    counts = statistics(Corpus(dialogues, asked), 5)
    said, questions = counts["conversations"], counts["questions"]
    names = ("contexts", "sessions", "segments", "turns", "images", "words", "turns_per_session", "words_per_turn")
    assert [said[name] for name in names] == [2, 3, 5, 4, 2, 10, 1.3333, 2.5]
    assert (questions["by_dimension"][belief], questions["by_dimension"]["pattern_induction"]) == (2, 0)
    assert (questions["by_split"], questions["letters_of_single"]) == ({"test": 2, "train": 1}, {"B": 1})
    per_item = ("options_per_item", "answer_cardinality", "anchors_per_item")
    assert [questions[name] for name in per_item] == [4.0, 2.0, 2.0]
    assert questions["answer_cardinality_by_format"] == {"single": 1.0, "multi": 3.0, "direct": 2.0}
    filters = {"in": 9, "kept": 5, "removed": {"leak": 4}}
    lines = as_markdown(counts, filters).splitlines()
    assert {"| Turns | 4 |", "| By dimension belief modeling | 2 (66.7%) |", "| removed: leak | 4 |"} <= {*lines}
    # a corpus without questions has a page too
    assert "| Total | 0 |" in as_markdown(statistics(Corpus(dialogues), 0), filters)
