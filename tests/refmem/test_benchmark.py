"""The split, checked piece by piece, and the counts of Table 2 by hand."""

from __future__ import annotations

from itertools import combinations
from random import Random

from refmem_samples import drafted, talk

from remind.data.dialogue import Corpus, Dialogue, Image, Question, Session, Turn
from remind.refmem.benchmark import as_markdown, split, statistics
from remind.refmem.drafts import near_pairs

TALKS = Corpus((talk(), talk("chat", 1)))


def test_the_sides_share_nothing() -> None:
    seed = 1
    rng, items = Random(seed), []
    for number in range(60):
        dialogue = rng.choice(TALKS.dialogues)
        evidence: dict[str, object] = {"evidence": tuple(rng.sample([turn.id for turn in dialogue.turns], 2))}
        if number % 5 == 0:
            evidence = {"evidence": (), "images": (rng.randrange(len(dialogue.images)),)}
        question = f"What about {rng.randrange(400)} and {rng.randrange(400)}?"
        place = {"dialogue_id": dialogue.id, "cluster_id": f"{dialogue.id}/{rng.randrange(60)}"}
        items.append(drafted(f"{seed}-{number}", question=question, **place, **evidence))
    sides = split(items, TALKS, 0.2, seed, 0.85)
    assert set(sides.values()) == {"train", "test"}
    for a, b in combinations(items, 2):
        if sides[a.id] != sides[b.id]:
            assert a.cluster_id != b.cluster_id
        if sides[a.id] != sides[b.id] and a.dialogue_id == b.dialogue_id:
            shared = [(turn.id, image.index) for turn in TALKS.dialogue(a.dialogue_id).turns for image in turn.images]
            first, second = ({*x.evidence, *(turn for turn, index in shared if index in x.images)} for x in (a, b))
            assert not first & second
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
    names = ("contexts", "sessions", "segments", "turns", "images", "words")
    assert [said[name] for name in names] == [2, 3, 5, 4, 2, 10]
    assert [said[name] for name in ("turns_per_session", "words_per_turn", "images_per_context")] == [1.3333, 2.5, 1.0]
    assert questions["by_format"] == {"single": 1, "multi": 1, "direct": 1}
    assert (questions["by_dimension"][belief], questions["by_dimension"]["pattern_induction"]) == (2, 0)
    assert questions["by_split"] == {"test": 2, "train": 1}
    per_item = ("options_per_item", "answer_cardinality", "anchors_per_item")
    assert [questions[name] for name in per_item] == [4.0, 2.0, 2.0]
    assert questions["answer_cardinality_by_format"] == {"single": 1.0, "multi": 3.0, "direct": 2.0}
    assert questions["letters_of_single"] == {"B": 1}
    filters = {"in": 9, "kept": 3, "removed": {"leak": 4, "near_duplicate": 2}}
    assert {
        "| Turns | 4 |",
        "| Belief modeling | 1 | 1 | 0 |",
        "| By dimension belief modeling | 2 (66.7%) |",
        "| Anchors per item | 2.00 |",
        "| removed: near duplicate | 2 |",
    } <= set(as_markdown(counts, filters).splitlines())
    # a corpus without questions has a page too
    assert "| Total | 0 |" in as_markdown(statistics(Corpus(dialogues), 0), filters)
