"""Items of a chat model, valid, invalid and mixed; each filter on items made to trip it, and on ones that must pass."""

from __future__ import annotations

import json
import re
from base64 import b64decode
from collections import Counter
from io import BytesIO
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import pytest
from PIL import Image as Picture
from refmem_samples import drafted, talk
from scripted_chat import Scripted, items_for

from remind.core.errors import ModelError
from remind.data.dialogue import DIMENSIONS, FORMATS, VISUAL_DIMENSIONS, Corpus, Dialogue, Image, Session, Turn
from remind.llm.request import Request
from remind.refmem.cluster import Cluster
from remind.refmem.config import FilterConfig, ItemsConfig
from remind.refmem.items import anchors_missing, apply_filters, item_request, near_pairs, shuffled, write_questions
from remind.states import prompts
from remind.text.words import stems

TALK = Corpus((talk(),))
OWN = [turn for turn in talk().turns if turn.speaker == "Ana" and turn.images]
IMAGES = tuple(image.index for turn in OWN for image in turn.images)
#: Every fourth session is on one subject; and a speaker's images.
CLUSTERS = [
    Cluster("text-0", "talk", "text", None, tuple(turn.id for one in talk().sessions[::4] for turn in one.turns)),
    Cluster("image-Ana", "talk", "image", "Ana", tuple(turn.id for turn in OWN), IMAGES),
]
OPTIONS = ["making bowls", "long walks", "loud music", "fast cars"]
FEW = {"question": "What calms Ana?", "evidence": ["D1:1", "D5:1"]}
GOOD = {**FEW, "format": "single", "options": OPTIONS, "answers": ["A"]}


def test_a_chat_model_is_asked_by_cluster_and_dimension() -> None:
    """Items of all dimensions and formats come out, on evidence that exists."""
    writer = Scripted(lambda request: items_for(request.messages[0].text, request.messages[1].text))
    items, counts = write_questions(TALK, CLUSTERS, writer, ItemsConfig(per_cluster=3))
    assert counts == {"requests": len(DIMENSIONS), "retried": 0, "dropped": 0}
    per_cell = Counter((item.cluster_id, item.dimension, item.format) for item in items)
    assert set(per_cell.values()) == {3}
    assert {one[1:] for one in per_cell} == {*product(DIMENSIONS, FORMATS)}
    assert {(item.made_by, item.prompt_id) for item in items} == {("scripted", prompts.prompt_id("refmem_items"))}
    for item in items:
        assert item.problem() is None
        assert not anchors_missing(item, TALK.dialogues[0])
        assert bool(item.images) == (item.dimension in VISUAL_DIMENSIONS)
    # of a large cluster some turns are shown
    request = item_request(TALK.dialogues[0], CLUSTERS[0], "belief_modeling", ItemsConfig(max_turns=5))
    assert len(re.findall(r"^\[D\d+:\d+\]", request.messages[1].text, re.MULTILINE)) == 5


def test_the_writer_sees_the_pictures_of_a_cluster(tmp_path: Path) -> None:
    """Each behind its line, as a server takes them; a line of a turn that reads the same is not it."""
    cat = tmp_path / "cat.png"
    Picture.new("RGB", (900, 600), (200, 30, 30)).save(cat)
    shown = Image(0, str(cat), "a cat"), Image(1, None, "a dog", "http://x/y.jpg"), Image(2, str(cat), "a cow")
    turns = (Turn("1", "Ana", "[image 0] a cat"), Turn("2", "Ana", "Look!", None, shown), Turn("3", "Ana", "Bye."))
    given, pixels = Dialogue("d", (Session("s", None, turns),)), ItemsConfig(images="pixels")
    group = Cluster("c", "d", "image", "Ana", ("1", "2", "3"), (0, 1))
    message = item_request(given, group, VISUAL_DIMENSIONS[0], pixels).messages[1]
    front, picture, rest = message.sent
    assert isinstance(front, dict)
    assert front["text"].endswith("[2] Ana: Look!\n[image 0] a cat\n")
    assert rest["text"].startswith("[image 1] a dog\n[image 2] a cow\n[3] Ana: Bye.")
    head, data = picture["image_url"]["url"].split(",")
    assert head == "data:image/jpeg;base64"
    assert Picture.open(BytesIO(b64decode(data))).size == (512, 341)
    plain = item_request(given, group, VISUAL_DIMENSIONS[0], ItemsConfig()).messages[1].sent
    assert plain == front["text"] + rest["text"]


def test_options_are_put_in_an_order_of_the_seed() -> None:
    """The model always has the right answer first; a benchmark must not."""
    first, other = ([shuffled(drafted(str(n)), seed).answers[0] for n in range(150)] for seed in "01")
    # 150 items: mean 37.5, deviation 5.3
    assert all(abs(first.count(letter) - 37.5) < 5 * 5.3 for letter in "ABCD")
    assert first != other


LETTERED = [f"{letter}. {option}" for letter, option in zip("ABCD", OPTIONS, strict=True)]


@pytest.mark.parametrize(
    "reply",
    [
        {"Items": [{**GOOD, "Format": "SINGLE", "answers": "a)", "evidence": ["[D1:1]"]}]},
        {"items": [{**GOOD, "candidates": None, "answers": ["A. making bowls"], "options": LETTERED}]},
        {"items": [{**FEW, "format": "direct", "answers": "making bowls"}]},
        {"items": [{**FEW, "format": "single", "options": OPTIONS, "answers": ["making bowls"]}]},
        {"items": ["an item", {**GOOD, "format": "essay"}, {**GOOD, "answers": ["A", "B"]}, GOOD]},
        f"Maybe {json.dumps({'items': [{**GOOD, 'answers': ['D']}]})}?\n</think>\n```json\n{json.dumps([GOOD])}\n```",
    ],
)
def test_what_is_right_in_a_reply_is_taken(reply: Any) -> None:
    items, counts = write_questions(TALK, CLUSTERS[:1], Scripted(lambda request: reply), ItemsConfig())
    assert [(item.gold, item.evidence[0]) for item in items] == [(("making bowls",), "D1:1")] * 5
    assert (counts["retried"], counts["dropped"]) == (0, 0)


def test_replies_of_no_use_are_asked_for_once_more() -> None:
    wrong = {**GOOD, "answers": ["E"]}
    replies = iter([wrong] * 6 + [GOOD] * 4)
    chat = Scripted(lambda request: {"items": [next(replies)]})
    items, counts = write_questions(TALK, CLUSTERS[:1], chat, ItemsConfig())
    assert (len(items), counts) == (4, {"requests": 5, "retried": 5, "dropped": 1})
    assert "cannot be used: an answer that is no option" in chat.batches[1][0].messages[-1].text
    with pytest.raises(ModelError, match="5 of 5 replies of scripted could not be used"):
        write_questions(TALK, CLUSTERS[:1], Scripted(lambda _: {"items": [GOOD]}), ItemsConfig(formats=["direct"]))


def test_items_are_removed_for_the_first_reason_and_the_first_of_its_kind_stays() -> None:
    habit = {"question": "Which habit of hers returns?"}
    items = [
        drafted("good", **habit),
        drafted("gone", evidence=("D99:1",)),
        drafted("leak", question="Does she like walking or not?"),
        drafted("long", options=("x" * 60, "cooking", "reading", "singing")),
        drafted("twin", **habit),
        drafted("near", question="Which is the habit of hers that returns?"),
        drafted("other", answers=("B",), **habit),
    ]
    reasons = {"gone": "evidence", "leak": "leak", "long": "uneven", "twin": "near_duplicate", "near": "near_duplicate"}
    assert apply_filters(items, TALK, FilterConfig())[0] == reasons


def test_near_pairs_are_those_of_a_brute_force() -> None:
    rng = Random(4)
    words = ["garden", "river", "kettle", "violin", "ladder", "pepper", "candle", "marble"]
    items = []
    for n in range(120):
        place = {"answers": (rng.choice(words[:3]),), "dialogue_id": rng.choice(["talk", "chat"])}
        items.append(drafted(str(n), "direct", question=" ".join(rng.choices(words, k=rng.randint(2, 6))), **place))
    bags = [set(stems(one.question)) for one in items]
    same = [(one.dialogue_id, one.answers) for one in items]
    pairs = [(i, j) for i, j in combinations(range(len(items)), 2) if same[i] == same[j]]
    expected = [(i, j) for i, j in pairs if len(bags[i] & bags[j]) / len(bags[i] | bags[j]) >= 0.4]
    assert near_pairs(items, 0.4) == expected != []


def test_what_a_model_answers_without_the_dialogue_goes() -> None:
    items = [
        drafted("by heart", question="What do people do with their feet?"),
        drafted("hard", question="Which of them is hers?"),
        drafted("said", "direct", answers=("green tea",), question="Her favourite drink?"),
        drafted("unsaid", "direct", answers=("oolong",), question="And her other drink?"),
        drafted("broken", question="Which one then?"),
    ]
    known = {"by heart": "walking", "hard": "cooking", "said": "Green tea", "unsaid": "tea"}

    def answer(request: Request) -> dict[str, list[str]] | None:
        if (wanted := known.get(request.sample)) is None:
            return None
        letter = re.search(rf"^(\w)\. {wanted}$", request.messages[1].text, re.MULTILINE)
        return {"answers": [letter[1] if letter else wanted]}

    chat = Scripted(answer)
    reasons, no_guess = apply_filters(items, TALK, FilterConfig(blind_draws=6), chat)
    assert (reasons, no_guess) == ({"by heart": "blind", "said": "blind"}, 6)
    # the options stand in several orders
    assert len({request.messages[1].text for request in chat.requests if request.sample == "by heart"}) > 1
