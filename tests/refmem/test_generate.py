"""Items of a chat model, valid, invalid and mixed."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from scripted_chat import Scripted, items_for

from remind.data.dialogue import DIMENSIONS, FORMATS, VISUAL_DIMENSIONS, Corpus
from remind.refmem.cluster import Cluster
from remind.refmem.config import ItemsConfig
from remind.refmem.generate import item_request, write_questions
from remind.refmem.items import anchors_missing
from remind.states import prompts


def clusters_of(corpus: Corpus) -> list[Cluster]:
    """Every fourth session is on one subject: those are the clusters; and each speaker's images."""
    clusters = []
    for dialogue in corpus.dialogues:
        for first in range(4):
            turns = [turn.id for session in dialogue.sessions[first::4] for turn in session.turns]
            clusters.append(Cluster(f"{dialogue.id}/text-{first}", dialogue.id, "text", None, tuple(turns)))
        for place, speaker in enumerate(dialogue.speakers):
            own = [turn for turn in dialogue.turns if turn.speaker == speaker and turn.images]
            images = tuple(image.index for turn in own for image in turn.images)
            if images:
                name = f"{dialogue.id}/image-{place}-0"
                clusters.append(Cluster(name, dialogue.id, "image", speaker, tuple(turn.id for turn in own), images))
    return clusters


GOOD = {
    "format": "single",
    "question": "What calms Ana?",
    "options": ["making bowls", "long walks", "loud music", "fast cars"],
    "answers": ["A"],
    "candidates": [],
    "evidence": ["D1:1", "D5:1"],
    "images": [],
}


def test_a_chat_model_is_asked_by_cluster_and_dimension(corpus: Corpus) -> None:
    """Items of all dimensions and formats come out, on evidence that exists."""
    clusters = {cluster.id: cluster for cluster in clusters_of(corpus)}
    chat = Scripted(lambda request: items_for(request.messages[0].text, request.messages[1].text))
    items, counts = write_questions(corpus, list(clusters.values()), chat, ItemsConfig(per_cluster=3))
    assert counts == {"requests": len(chat.requests), "retried": 0, "dropped": 0}
    assert all(request.stage == "questions" and request.schema is not None for request in chat.requests)
    first = chat.requests[0]
    assert all(f"[{turn}]" in first.messages[1].text for turn in clusters[first.sample].turns)
    per_cell = Counter((item.cluster_id, item.dimension, item.format) for item in items)
    assert set(per_cell.values()) == {3}
    assert {dimension for _, dimension, _ in per_cell} == set(DIMENSIONS)
    assert {kind for *_, kind in per_cell} == {"single", "multi", "direct"}
    assert len({item.id for item in items}) == len(items)
    assert {(item.made_by, item.prompt_id) for item in items} == {("scripted", prompts.prompt_id("refmem_items"))}
    for item in items:
        assert item.problem() is None
        assert not anchors_missing(item, corpus.dialogue(item.dialogue_id))
        assert bool(item.images) == (item.dimension in VISUAL_DIMENSIONS)
        assert item.dialogue_id == clusters[item.cluster_id].dialogue_id


def test_options_are_put_in_an_order_of_the_seed(corpus: Corpus) -> None:
    """The script always has the right answer second; a benchmark must not."""

    def letters(seed: int) -> Counter[str]:
        chat = Scripted(lambda request: items_for(request.messages[0].text, request.messages[1].text))
        config = ItemsConfig(per_cluster=4, formats=["single"], seed=seed)
        items, _ = write_questions(corpus, clusters_of(corpus), chat, config)
        assert all(item.gold == (chosen,) for item in items for chosen in [item.options["ABCD".index(item.answers[0])]])
        return Counter(item.answers[0] for item in items)

    first = letters(0)
    # 208 items: mean 52, deviation 6.2
    assert sum(first.values()) == 208
    assert all(abs(first[letter] - 52) < 5 * 6.2 for letter in "ABCD")
    assert letters(0) == first != letters(1)


def test_what_the_dialogue_says_cannot_close_the_fence(corpus: Corpus) -> None:
    request = item_request(corpus.dialogues[0], clusters_of(corpus)[0], "belief_modeling", ItemsConfig(max_turns=5))
    opening, *lines, closing = request.messages[1].text.split("\n")
    code = opening.split()[-1]
    assert (opening, closing) == (f"<<<passages {code}", f"passages {code}>>>")
    assert code in request.messages[0].text
    assert not any(code in line for line in lines)
    assert sum(bool(re.match(r"\[D\d+:\d+\]", line)) for line in lines) == 5


def test_invalid_items_are_left_out_and_unusable_replies_asked_for_once_more(corpus: Corpus) -> None:
    cluster = clusters_of(corpus)[0]
    wrong = {**GOOD, "answers": ["E"]}
    broken = [wrong, {**GOOD, "options": ["a", "b"]}, {**GOOD, "answers": ["A", "B"]}, GOOD]

    def written(answer: Any, *formats: str) -> tuple[int, dict[str, int], Scripted]:
        chat = Scripted(answer)
        items, counts = write_questions(corpus, [cluster], chat, ItemsConfig(formats=list(formats or FORMATS)))
        assert all(item.gold == ("making bowls",) for item in items)
        return len(items), counts, chat

    def counted(retried: int, dropped: int) -> dict[str, int]:
        return {"requests": 5, "retried": retried, "dropped": dropped}

    # the client has asked again for what does not match the schema
    assert written(lambda request: None)[:2] == (0, counted(0, 5))
    assert written(lambda request: {"items": broken})[:2] == (5, counted(0, 0))
    assert written(lambda request: {"items": []})[:2] == (0, counted(0, 0))
    assert written(lambda request: {"items": [GOOD]}, "direct")[:2] == (0, counted(5, 5))
    *outcome, stubborn = written(lambda request: {"items": [wrong]})
    assert outcome == [0, counted(5, 5)]
    assert [message.role for message in stubborn.requests[5].messages] == ["system", "user", "assistant", "user"]
    assert "an answer that is no option" in stubborn.requests[5].messages[-1].text
    repaired = written(lambda request: {"items": [GOOD if len(request.messages) == 4 else wrong]})
    assert repaired[:2] == (5, counted(5, 0))
