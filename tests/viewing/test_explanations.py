"""Names of features: a scripted chat model that knows when features fire, or guesses, or replies nonsense."""

from __future__ import annotations

import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.core.errors import DataError
from remind.core.files import read_json
from remind.llm.client import CachedChat
from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Reply, Request
from remind.viewing.excerpts import Background, Captions, Excerpt, distinctive_words
from remind.viewing.explanations import (
    Explanation,
    explain,
    read_explanations,
    words_of,
    write_explanations,
)
from sae import SparseCodes, TopKSAE
from sae.probe import Encoded, TopExamples
from sae.probe.pictures import TopPictures

WORDS = ["tea", "river", "violin", "garden", "train", "letter", "candle", "bridge"]
FILLER = ["the", "day", "was", "long", "and", "we", "went", "out", "again", "before", "it", "rained", "on", "us"]


class Scripted(CachedChat):
    """A chat model that is a function of the prompt; calls are counted, replies pass the house's checks."""

    def __init__(self, answer: Callable[[Request], str], cache: Any = None) -> None:
        super().__init__(EndpointConfig("scripted"), cache)
        self.answer, self.calls = answer, 0

    def ask(self, asked: Sequence[Request], put: Any) -> None:
        for place, request in enumerate(asked):
            if (reply := self.recorded(request)) is None:
                self.calls += 1
                reply = self.record(request, Reply(self.answer(request)))
            put(place, reply)


def parts(request: Request) -> tuple[str, list[str]]:
    """Description ("" where a name is asked for) and excerpts of a prompt, as a reader finds them."""
    text = request.messages[1].text
    fences = dict(re.findall(r"<<<(\w+) \w+\n(.*?)\n\1 \w+>>>", text, re.DOTALL))
    return fences.get("description", ""), [line.split(". ", 1)[1] for line in fences["excerpts"].splitlines()]


def oracle(request: Request) -> str:
    """Names a feature by the word that is marked in every excerpt, and holds each excerpt against the name."""
    name, excerpts = parts(request)
    if not name:
        marked = [set(re.findall(r"«(.+?)»", text)) for text in excerpts]
        return " ".join(sorted(set.intersection(*marked)))
    if "«" in "".join(excerpts):
        return json.dumps({"verdicts": [f"«{name}»" in text for text in excerpts]})
    return json.dumps({"verdicts": [name in text.split() for text in excerpts]})


def encoded(text: list[str]) -> Encoded:
    """Words as tokens; feature f fires on word f of WORDS, feature 8 on every "the"."""
    joined = " ".join(text)
    ends = torch.tensor([len(" ".join(text[: n + 1])) for n in range(len(text))])
    lengths = torch.tensor([len(word) for word in text])
    numbers = {word: n for n, word in enumerate([*WORDS, "the"])}
    found = torch.tensor([[numbers.get(word, 9)] for word in text])
    values = torch.where(found < 9, 1.0 + torch.arange(len(text))[:, None] / 100, 0.0)
    none = torch.zeros(len(text), dtype=torch.bool)
    ids = torch.tensor([([*WORDS, *FILLER]).index(word) for word in text])
    codes = {3: SparseCodes(values, found)}
    return Encoded(joined, ids, tuple(text), torch.stack([ends - lengths, ends], 1), codes, none, none, none)


@pytest.fixture(scope="module")
def corpus() -> list[Encoded]:
    """Each text holds three of the words once, far from one another, so that no excerpt holds two of them."""
    draws, texts = random.Random(0), []
    for _ in range(160):
        chunks = [[*draws.choices(FILLER, k=10), word, *draws.choices(FILLER, k=10)] for word in draws.sample(WORDS, 3)]
        texts.append(encoded([word for chunk in chunks for word in chunk]))
    return texts


class Words:
    """Ids to words, as a tokenizer decodes them."""

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [8]}

    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(([*WORDS, *FILLER])[i] for i in ids)


@pytest.fixture(scope="module")
def record(corpus: list[Encoded]) -> TopExamples:
    examples = TopExamples(10, 20, (5, 5), tokenizer=Words(), metadata={"layer": 3})
    examples.add(corpus, 3)
    return examples


@pytest.fixture(scope="module")
def background(corpus: list[Encoded]) -> Background:
    return Background.of(corpus, 3, 11)


def test_an_oracle_is_always_right_and_another_name_is_not(record: TopExamples, background: Background) -> None:
    found, failures = explain(Scripted(oracle), record, background, range(8), 10)
    assert not failures
    assert {feature: one.text for feature, one in found.items()} == dict(enumerate(WORDS))
    for one in found.values():
        assert one.scores["detection"] == pytest.approx({"value": 1.0, "low": 0.8389, "high": 1.0, "n": 20}, abs=1e-4)
        assert one.scores["fuzzing"]["value"] == 1.0
        # says no to everything: right for the half that is negative
        assert one.scores["detection_control"]["value"] == pytest.approx(0.5, abs=0.1)
        assert one.scores["fuzzing_control"]["value"] == 0.5


def test_a_coin_is_right_half_of_the_time(record: TopExamples, background: Background) -> None:
    draws = random.Random(1)

    def coin(request: Request) -> str:
        name, excerpts = parts(request)
        return json.dumps({"verdicts": [draws.random() < 0.5 for _ in excerpts]}) if name else str(draws.random())

    found, _ = explain(Scripted(coin), record, background, range(8), 10)
    for kind in ("detection", "fuzzing", "detection_control"):
        right = [one.scores[kind]["value"] * one.scores[kind]["n"] for one in found.values()]
        n = sum(one.scores[kind]["n"] for one in found.values())
        assert abs(sum(right) - n / 2) < 3 * math.sqrt(n) / 2


def test_features_of_images_alone_are_named_by_captions(record: TopExamples, background: Background) -> None:
    top, text, shown = TopPictures(10, 20), {}, {}
    for number in range(40):
        path, fires = f"p{number}.png", number % 2 == 0
        text[path] = f"a {'violin' if fires else 'garden'} beside number {number}"
        values = torch.full((4, 1), 1 + number / 100 if fires else 0.0)
        top.add(path, SparseCodes(values, torch.full((4, 1), 9)), 2)
        shown[path] = frozenset({9} if fires else ())
    captions = Captions(text, top, shown)
    asked: list[Request] = []

    def common(request: Request) -> str:
        asked.append(request)
        name, excerpts = parts(request)
        if not name:
            return " ".join(set.intersection(*(set(one.split()) for one in excerpts)) - {"a", "beside", "number"})
        return json.dumps({"verdicts": [name in one.split() for one in excerpts]})

    found, failures = explain(Scripted(common), record, background, [9], 10, captions)
    assert not failures
    assert found[9].text == "violin"
    # no patch is marked, so there is nothing to fuzz
    assert {kind: (one["value"], one["n"]) for kind, one in found[9].scores.items()} == {"detection": (1.0, 20)}
    assert [request.prompt_id.split("-")[0] for request in asked] == ["explain_captions", "explain_detection"]
    assert explain(Scripted(common), record, background, [9], 10) == ({}, [])
    texts = {9: [one.text for one in captions.excerpts(9)]}
    counts = Counter(word for one in text.values() for word in one.split())
    assert words_of(texts, counts)[9].text.split(", ")[0] == "violin"


def test_what_is_shown_is_not_what_is_judged(record: TopExamples, background: Background) -> None:
    asked: list[Request] = []

    def listen(request: Request) -> str:
        asked.append(request)
        return oracle(request)

    explain(Scripted(listen), record, background, [2], 10)
    (named, detection, fuzzing) = (parts(request)[1] for request in asked)
    plain = {re.sub("[«»]", "", text) for text in named}
    assert not plain & {re.sub("[«»]", "", text) for text in (*detection, *fuzzing)}
    assert len(named) == 10
    assert len(detection) == 20
    assert sum("violin" in text.split() for text in detection) == 10
    # the marks: a word each; in half of the excerpts not the one that fires
    assert [text.count("«") for text in fuzzing] == [1] * 10
    assert sum("«violin»" in text for text in fuzzing) == 5


@pytest.mark.parametrize(
    ("reply", "failure", "says"),
    [
        ("I think so.", "invalid", "no JSON"),
        ('{"verdicts": [true]}', "invalid", "too short"),
        (" ", "unusable", "no name"),
        ("<<<excerpts 01234567 1. we went out", "unusable", "no name"),
    ],
)
def test_failures_are_no_wrong_answers(
    record: TopExamples, background: Background, reply: str, failure: str, says: str
) -> None:
    """One feature's replies are bad: its scores are missing, the others' are whole."""

    def broken(request: Request) -> str:
        bad = request.sample.startswith("layer 3 feature 4")
        return reply if bad and (failure == "unusable") == (parts(request)[0] == "") else oracle(request)

    found, failures = explain(Scripted(broken), record, background, range(8), 10)
    assert {one.failure for one in failures} == {failure}
    assert all(says in one.message and one.sample.startswith("layer 3 feature 4") for one in failures)
    assert len(failures) == (1 if failure == "unusable" else 4)
    if failure == "invalid":
        assert set(found.pop(4).scores.values()) == {None}
    assert set(found) == {0, 1, 2, 3, 5, 6, 7}
    assert all(one.scores["detection"]["value"] == 1 for one in found.values())


def test_files_hold_what_was_found(
    record: TopExamples, background: Background, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from remind.llm.cache import ReplyCache

    cache = ReplyCache(tmp_path / "replies.sqlite")
    coder = TopKSAE(4, 10, 1, generator=torch.Generator().manual_seed(0))
    chats = [Scripted(oracle, cache), Scripted(oracle, cache)]
    for chat in chats:
        found, failures = explain(chat, record, background, range(8), 10)
    # a second run asks nothing
    assert [chat.calls for chat in chats] == [8 + 8 * 4, 0]
    found[8] = Explanation("the, day")
    summary = write_explanations(tmp_path / "x", 3, coder, found, failures, "scripted")
    assert summary["detection"]["value"] == 1.0
    assert summary["detection"]["n"] == 8
    assert summary["fuzzing_control"]["value"] == 0.5
    assert read_explanations(tmp_path / "x", {3: coder}) == {3: found}
    assert str(found[8]) == "words: the, day"
    assert str(found[1]).startswith("river (detection 1.00, detection_control 0.")
    with pytest.raises(DataError, match="another SAE"):
        read_explanations(tmp_path / "x", {3: TopKSAE(4, 10, 1)})
    with pytest.raises(DataError, match="feature-pages writes them"):
        read_explanations(tmp_path)
    path = tmp_path / "x" / "layer_3.explanations.json"
    content = read_json(path)
    content["features"]["1"]["scores"]["detection"] = "high"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"layer_3\.explanations\.json: no explanations"):
        read_explanations(tmp_path / "x")


def test_words_are_those_that_set_examples_apart(record: TopExamples, corpus: list[Encoded]) -> None:
    counts = Counter(word for one in corpus for word in one.text.split())
    texts = {feature: [one.text for one in record.examples(feature)] for feature in range(8)}
    first = {feature: one.text.split(", ")[0] for feature, one in words_of(texts, counts).items()}
    assert first == dict(enumerate(WORDS))
    # not what is as common everywhere, what occurs once, or what is cut
    excerpts, every = ["tea and tea", "more tea"], {"tea": 4, "and": 40, "more": 40, "rest": 916}
    assert distinctive_words(excerpts, every) == ["tea"]
    assert distinctive_words(["and so and", "and and"], {"and": 999, "so": 1}) == []
    assert distinctive_words(["tea te", "te tea"], {"tea": 5, "rest": 95}) == ["tea"]
    assert distinctive_words([], {}) == []


def test_marks_stand_round_words() -> None:
    one = Excerpt(("I", " had", " hot", " tea", ".", "\n"), (False, False, True, True, False, True))
    assert one.marked(one.fires) == "I had «hot tea»."
    assert one.text == "I had hot tea."
