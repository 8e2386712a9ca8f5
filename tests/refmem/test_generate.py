"""Offline items recounted from the raw text; items of a chat model, good, nonsense and half-good."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from remind.data.dialogue import DIMENSIONS, TEXT_DIMENSIONS, VISUAL_DIMENSIONS, Corpus, Dialogue
from remind.llm.request import Reply, Request
from remind.refmem.claims import shape
from remind.refmem.cluster import Cluster
from remind.refmem.config import ItemsConfig
from remind.refmem.generate import item_request, write_asked
from remind.refmem.items import Item, anchors_missing
from remind.refmem.offline import balanced, write_offline
from remind.refmem.themes import listed
from remind.states import prompts
from remind.text.words import stem


def clusters_of(corpus: Corpus) -> list[Cluster]:
    """Every fourth session is on one subject: those are the clusters; and each speaker's images."""
    made = []
    for dialogue in corpus.dialogues:
        for first in range(4):
            turns = [turn.id for session in dialogue.sessions[first::4] for turn in session.turns]
            made.append(Cluster(f"{dialogue.id}/text-{first}", dialogue.id, "text", None, tuple(turns)))
        for place, speaker in enumerate(dialogue.speakers):
            own = [turn for turn in dialogue.turns if turn.speaker == speaker and turn.images]
            images = tuple(image.index for turn in own for image in turn.images)
            if images:
                name = f"{dialogue.id}/image-{place}-0"
                made.append(Cluster(name, dialogue.id, "image", speaker, tuple(turn.id for turn in own), images))
    return made


@pytest.fixture
def items(corpus: Corpus) -> list[Item]:
    return write_offline(corpus, clusters_of(corpus), ItemsConfig(per_cluster=4))


def says(text: str, word: str) -> bool:
    return stem(word) in {stem(one) for one in re.findall(r"[a-z]+", text.lower())}


def sittings(dialogue: Dialogue, speaker: str, word: str, near: frozenset[str] | None = None) -> set[int]:
    """Sessions in which the speaker says the word (in a sentence with one of `near`)."""
    found = set()
    for number, session in enumerate(dialogue.sessions):
        for turn in session.turns:
            for sentence in re.split(r"(?<=\.)\s", turn.text) if turn.speaker == speaker else ():
                words = set(re.findall(r"[a-z']+", sentence.lower()))
                if says(sentence, word) and (near is None or words & near):
                    found.add(number)
    return found


def pictures(dialogue: Dialogue, speaker: str, *words: str) -> set[int]:
    return {
        image.index
        for turn in dialogue.turns
        for image in turn.images
        if turn.speaker == speaker and all(says(image.caption or "", word) for word in words)
    }


def test_all_dimensions_and_formats_are_there_and_anchors_exist(corpus: Corpus, items: list[Item]) -> None:
    assert {item.dimension for item in items} == set(DIMENSIONS)
    assert {item.format for item in items} == {"single", "multi", "direct"}
    assert len({item.id for item in items}) == len(items) > 80
    clusters = {cluster.id: cluster for cluster in clusters_of(corpus)}
    for item in items:
        assert item.problem() is None
        assert not anchors_missing(item, corpus.dialogue(item.dialogue_id))
        assert item.prompt_id == prompts.prompt_id("refmem_offline")
        # nothing but the cluster's own: else a split by cluster would leak
        assert set(item.evidence) <= set(clusters[item.cluster_id].turns)
        assert set(item.images) <= set(clusters[item.cluster_id].images)
        assert bool(item.images) == (item.dimension in VISUAL_DIMENSIONS)
        if item.format == "direct":
            assert set(item.answers) <= set(item.candidates)


def recount(talk: Dialogue, item: Item) -> tuple[str, bool, bool]:
    """Which wording it is, whether all answers are true, and whether all other options are false."""
    who = next(name for name in talk.speakers if re.search(rf"\b{name}\b", item.question))
    question = item.question
    near = listed("stances", item.dimension) if "same breath" in question else None

    def said(word: str) -> set[int]:
        return sittings(talk, who, word)

    match = re.search(r"speaks? of (\w+)|pictures of (\w+)|picture of (\w+)", question)
    theme = next(word for word in match.groups() if word) if match else ""
    shown = pictures(talk, who, theme) if theme else set()
    texts = [turn.text for turn in talk.turns if any(image.index in shown for image in turn.images)]
    kinds: list[tuple[str, Callable[[str], bool], Callable[[str], bool]]] = [
        ("same breath", lambda w: len(sittings(talk, who, w, near)) > 1, lambda w: not sittings(talk, who, w, near)),
        ("coming back to", lambda w: len(said(w)) >= 3, lambda w: len(said(w)) == 1),
        ("In how many separate sittings", lambda w: w == str(len(said(theme))), bool),
        ("speaks of", lambda w: len(said(w) & said(theme)) > 1, lambda w: not said(w) & said(theme)),
        ("pictures show again", lambda w: len(pictures(talk, who, w)) >= 3, lambda w: not pictures(talk, who, w)),
        (
            "'s pictures of",
            lambda w: len(pictures(talk, who, theme, w)) > 1,
            lambda w: not pictures(talk, who, theme, w) and bool(pictures(talk, who, w)),
        ),
        ("shares a picture", lambda w: any(says(t, w) for t in texts), lambda w: not any(says(t, w) for t in texts)),
    ]
    for kind, holds, fails in kinds:
        if kind in question:
            wrong = [option for option in item.options if option not in item.gold]
            return kind, all(map(holds, item.gold)), all(map(fails, wrong))
    return "", True, True


def test_the_answers_are_true_and_the_distractors_false_by_a_recount(corpus: Corpus, items: list[Item]) -> None:
    checked: Counter[str] = Counter()
    for item in items:
        kind, holds, fails = recount(corpus.dialogue(item.dialogue_id), item)
        assert holds, item
        assert fails, item
        checked[kind] += 1
    assert {"same breath", "coming back to", "speaks of", "'s pictures of", "shares a picture"} <= set(checked)


def test_days_and_borders_are_those_of_the_sessions(corpus: Corpus) -> None:
    # two subjects that the made-up talk lacks, one early and one late
    talk = corpus.dialogues[0]

    def with_word(dialogue: Dialogue, number: int, word: str) -> Dialogue:
        sessions = list(dialogue.sessions)
        first, *rest = sessions[number].turns
        text = first.text + f" I saw the {word}. My {word} too."
        sessions[number] = replace(sessions[number], turns=(replace(first, text=text), *rest))
        return Dialogue(dialogue.id, tuple(sessions))

    for number, word in ((0, "zeppelin"), (2, "zeppelin"), (10, "marmot"), (12, "marmot")):
        talk = with_word(talk, number, word)
    cluster = Cluster("talk/text-0", "talk", "text", None, tuple(turn.id for turn in talk.turns))
    made = write_offline(Corpus((talk,)), [cluster], ItemsConfig(per_cluster=200))
    asked = {item.question: item for item in made}
    assert asked["On what day does Ana first speak of zeppelin?"].answers == ("1 January 2023",)
    assert asked["On what day does Ana last speak of zeppelin?"].answers == ("3 March 2023",)
    assert asked["On what day does Ana last speak of marmot?"].answers == ("13 January 2023",)
    assert asked["How does Ana's talk of marmot run over all the sittings?"].gold == (
        "In the second half of the sittings only",
    )
    border = [item for item in made if "take up only after" in item.question and "marmot" in item.gold]
    assert border
    assert all("zeppelin" not in item.gold for item in border)


@pytest.mark.parametrize(
    ("sessions", "expected"), [([0, 1, 4], 0), ([5, 9], 1), ([1, 4, 6], 2), ([0, 9], 3), ([4, 5], 2), ([0, 4], 0)]
)
def test_the_course_of_a_subject(sessions: list[int], expected: int) -> None:
    assert shape(sessions, 10) == expected


def test_letters_are_balanced_and_the_texts_are_kept(items: list[Item]) -> None:
    counts = Counter(item.answers[0] for item in items if item.format == "single")
    assert max(counts.values()) - min(counts.values()) <= 1
    again = balanced(items, 5)
    assert [item.id for item in again] == [item.id for item in items]
    for old, new in zip(items, again, strict=True):
        assert set(old.options) == set(new.options)
        assert set(old.gold) == set(new.gold)
    assert again != items


def test_the_same_seed_gives_the_same_items(corpus: Corpus, items: list[Item]) -> None:
    assert write_offline(corpus, clusters_of(corpus), ItemsConfig(per_cluster=4)) == items
    other = write_offline(corpus, clusters_of(corpus), ItemsConfig(per_cluster=4, seed=1))
    assert other != items
    few = write_offline(corpus, clusters_of(corpus), ItemsConfig(per_cluster=1, formats=["single"]))
    most = Counter((item.cluster_id, item.dimension) for item in few)
    assert set(most.values()) == {1}
    assert {item.format for item in few} == {"single"}


def test_one_dialogue_without_images(make_dialogue: Callable[..., Dialogue]) -> None:
    alone = Corpus((make_dialogue(images=False),))
    made = write_offline(alone, clusters_of(alone), ItemsConfig())
    assert {item.dimension for item in made} == set(TEXT_DIMENSIONS)


class Scripted:
    """A chat model that replies by a function of the request and remembers what it was asked."""

    name = "scripted"

    def __init__(self, reply: Callable[[Request, int], str]) -> None:
        self.reply, self.asked = reply, list[Request]()

    def complete(
        self, requests: Sequence[Request], on_reply: Callable[[int, Reply], None] | None = None
    ) -> list[Reply]:
        replies = []
        for request in requests:
            self.asked.append(request)
            replies.append(Reply(self.reply(request, len(self.asked))))
            if on_reply is not None:
                on_reply(len(replies) - 1, replies[-1])
        return replies


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
    cluster = clusters_of(corpus)[0]
    chat = Scripted(lambda request, n: json.dumps({"items": [GOOD]}))
    made, counts = write_asked(corpus, [cluster], chat, ItemsConfig())
    assert counts == {"requests": 5, "retried": 0, "dropped": 0}
    assert [item.dimension for item in made] == list(TEXT_DIMENSIONS)
    assert {(item.made_by, item.prompt_id) for item in made} == {("scripted", prompts.prompt_id("refmem_items"))}
    assert all(request.stage == "questions" and request.schema is not None for request in chat.asked)
    shown = chat.asked[0].messages[1].text
    assert all(f"[{turn}]" in shown for turn in cluster.turns)


def test_what_the_dialogue_says_cannot_close_the_fence(corpus: Corpus) -> None:
    request = item_request(corpus.dialogues[0], clusters_of(corpus)[0], "belief_modeling", ItemsConfig(max_turns=5))
    opening, *lines, closing = request.messages[1].text.split("\n")
    code = opening.split()[-1]
    assert opening == f"<<<passages {code}"
    assert closing == f"passages {code}>>>"
    assert not any(code in line for line in lines)
    assert code in request.messages[0].text
    assert sum(bool(re.match(r"\[D\d+:\d+\]", line)) for line in lines) == 5


def test_nonsense_is_counted_retried_once_and_dropped(corpus: Corpus) -> None:
    cluster = clusters_of(corpus)[0]
    bad = Scripted(lambda request, n: "I would rather not.")
    made, counts = write_asked(corpus, [cluster], bad, ItemsConfig())
    assert made == []
    assert counts == {"requests": 5, "retried": 5, "dropped": 5}
    assert len(bad.asked) == 10
    assert [message.role for message in bad.asked[5].messages] == ["system", "user", "assistant", "user"]

    def second(request: Request, n: int) -> str:
        return json.dumps({"items": [GOOD]}) if len(request.messages) == 4 else "{"

    made, counts = write_asked(corpus, [cluster], Scripted(second), ItemsConfig())
    assert len(made) == 5
    assert counts == {"requests": 5, "retried": 5, "dropped": 0}


def test_items_that_are_none_are_left_out_and_none_at_all_is_an_answer(corpus: Corpus) -> None:
    cluster = clusters_of(corpus)[0]
    broken = [{**GOOD, "answers": ["E"]}, {**GOOD, "options": ["a", "b"]}, {**GOOD, "answers": ["A", "B"]}]
    mixed = Scripted(lambda request, n: "Sure: " + json.dumps({"items": [*broken, GOOD]}))
    made, counts = write_asked(corpus, [cluster], mixed, ItemsConfig())
    assert (len(made), counts["retried"]) == (5, 0)
    only = Scripted(lambda request, n: json.dumps({"items": broken}))
    assert write_asked(corpus, [cluster], only, ItemsConfig())[1] == {"requests": 5, "retried": 5, "dropped": 5}
    empty = Scripted(lambda request, n: '{"items": []}')
    assert write_asked(corpus, [cluster], empty, ItemsConfig()) == ([], {"requests": 5, "retried": 0, "dropped": 0})
