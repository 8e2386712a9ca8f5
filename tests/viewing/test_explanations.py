"""Names of features: a scripted chat model that knows when features fire, or replies nonsense."""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scripted_chat import Scripted
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from remind.core.errors import DataError
from remind.llm.request import Request
from remind.viewing.explanations import (
    Background,
    background_of,
    caption_excerpt,
    explain,
    read_explanations,
    write_explanations,
)
from sae import SparseCodes, TopKSAE
from sae.probe import Encoded, TopExamples

WORDS = ["tea", "river", "violin", "garden", "train", "letter", "candle", "bridge"]
FILLER = ["the", "day", "was", "long", "and", "we", "went", "out", "again", "before", "it", "rained", "on", "us"]


def parts(request: Request) -> tuple[str, list[str]]:
    """Description ("" where a name is asked for) and excerpts of a prompt, as a reader finds them."""
    text = request.messages[1].text
    fences = dict(re.findall(r"<<<(\w+) \w+\n(.*?)\n\1 \w+>>>", text, re.DOTALL))
    return fences.get("description", ""), [line.split(". ", 1)[1] for line in fences["excerpts"].splitlines()]


def oracle(request: Request) -> Any:
    """Names a feature by the word that is marked in every excerpt, and holds each excerpt against the name."""
    name, excerpts = parts(request)
    if not name:
        marked = [set(re.findall(r"«(.+?)»", text) or text.split()) for text in excerpts]
        return " ".join(set.intersection(*marked) - {"a", "beside", "number"})
    fuzzed = "«" in "".join(excerpts)
    return {"verdicts": [f"«{name}»" in text if fuzzed else name in text.split() for text in excerpts]}


def encoded(text: list[str]) -> Encoded:
    """Words as tokens; feature f fires on word f of WORDS, feature 8 on every "the"."""
    spans = [found.span() for found in re.finditer(r"\S+", " ".join(text))]
    numbers = {word: n for n, word in enumerate([*WORDS, "the"])}
    found = torch.tensor([[numbers.get(word, 9)] for word in text])
    values = torch.where(found < 9, 1.0 + torch.arange(len(text))[:, None] / 100, 0.0)
    none = torch.zeros(len(text), dtype=torch.bool)
    ids = torch.tensor([([*WORDS, *FILLER]).index(word) for word in text])
    codes = {3: SparseCodes(values, found)}
    return Encoded(" ".join(text), ids, tuple(text), torch.tensor(spans), codes, none, none, none)


@pytest.fixture(scope="module")
def corpus() -> list[Encoded]:
    """Each text holds three of the words once, far from one another, so that no excerpt holds two of them."""
    draws = random.Random(0)
    filler = partial(draws.choices, FILLER, k=10)
    return [
        encoded([one for word in draws.sample(WORDS, 3) for one in (*filler(), word, *filler())]) for _ in range(160)
    ]


@pytest.fixture(scope="module")
def record(corpus: list[Encoded]) -> TopExamples:
    words = Tokenizer(WordLevel({word: n for n, word in enumerate([*WORDS, *FILLER])}, unk_token="the"))
    decoder = PreTrainedTokenizerFast(tokenizer_object=words)
    examples = TopExamples(10, 20, (5, 5), tokenizer=decoder, metadata={"layer": 3})
    examples.add(corpus, 3)
    return examples


@pytest.fixture(scope="module")
def background(corpus: list[Encoded]) -> Background:
    return background_of(corpus, 3, 11)


def test_an_oracle_is_right_and_another_name_is_not(record: TopExamples, background: Any, tmp_path: Path) -> None:
    chat = Scripted(oracle)
    found, failures = explain(chat, record, background, range(8), 10)
    assert not failures
    assert {feature: one.text for feature, one in found.items()} == dict(enumerate(WORDS))
    for one in found.values():
        assert one.scores["detection"] == pytest.approx({"value": 1.0, "low": 0.8389, "high": 1.0, "n": 20}, abs=1e-4)
        assert one.scores["fuzzing"]["value"] == 1.0
        # says no to everything: right for the half that is negative
        assert one.scores["detection_control"]["value"] == pytest.approx(0.5, abs=0.1)
        assert one.scores["fuzzing_control"]["value"] == 0.5
    # what is shown is not what is judged
    asked = [parts(request)[1] for request in chat.requests if request.sample.startswith("layer 3 feature 2")]
    named, detection, _, fuzzing, _ = [{re.sub("[«»]", "", text) for text in one} for one in asked]
    assert not named & {*detection, *fuzzing}
    coder, other = (TopKSAE(4, 10, 1, generator=torch.Generator().manual_seed(n)) for n in range(2))
    summary = write_explanations(tmp_path / "x", 3, coder, found, failures, "scripted", {})
    assert (summary["detection"]["value"], summary["detection"]["n"]) == (1.0, 8)
    assert read_explanations(tmp_path / "x", {3: coder}) == {3: found}
    with pytest.raises(DataError, match="another SAE"):
        read_explanations(tmp_path / "x", {3: other})


def test_features_of_images_alone_are_named_by_captions(record: TopExamples, background: Background) -> None:
    names = ("garden", "violin")
    silent, fire = ([caption_excerpt(f"a {word} beside number {n}") for n in range(20)] for word in names)
    at_large = [(one, frozenset({9})) for one in fire] + [(one, frozenset()) for one in silent]
    found, failures = explain(Scripted(oracle), record, background, [9], 10, ({9: fire}, at_large))
    assert not failures
    assert found[9].text == "violin"
    # no patch is marked, so there is nothing to fuzz
    assert {kind: (one["value"], one["n"]) for kind, one in found[9].scores.items()} == {"detection": (1.0, 20)}


def test_failures_are_no_wrong_answers(record: TopExamples, background: Background) -> None:
    """The verdicts on one feature cannot be read: its scores are missing, the others' are whole."""

    def broken(request: Request) -> Any:
        judged = request.sample.startswith("layer 3 feature 4") and parts(request)[0]
        return None if judged else oracle(request)

    found, failures = explain(Scripted(broken), record, background, range(8), 10)
    assert [one.failure for one in failures] == ["invalid"] * 4
    assert set(found.pop(4).scores.values()) == {None}
    assert set(found) == {0, 1, 2, 3, 5, 6, 7}
    assert all(one.scores["detection"]["value"] == 1 for one in found.values())
