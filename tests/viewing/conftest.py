"""States grounded by the true code on a backbone that is a table: what a page shows needs no model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from remind.data.dialogue import Dialogue, Image, Question, Session, Turn
from remind.grounding import Grounder, GroundingConfig
from remind.models.chat import Tokens
from remind.states.pyramid import FactualState, ReflectiveState, Segment, Strategy
from remind.states.records import record_of
from remind.viewing.inspector.page import Inspection
from sae import TopKSAE, pages

WIDTH, D_SAE, K = 16, 192, 6
WORDS = re.findall(r"\w+", "dog walk rain tea garden blue train music bread night letter stone bird river cake sister")


class Table:
    """A backbone whose hidden state of a token is a row of a table; every letter of an emoji is two tokens."""

    name, n_layers, hidden_size, causal, max_length = "table", 4, WIDTH, False, 512
    frame: tuple[list[int], list[int]] = ([], [])
    device = torch.device("cpu")
    tokenizer = SimpleNamespace(pad_token_id=0)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn(self.n_layers + 1, 997, WIDTH, generator=generator)

    def tokenize(self, text: str) -> Tokens:
        ids, offsets = [], []
        for found in re.finditer(r"\w+|[^\w\s]", text):
            number = sum(ord(c) * 31**i for i, c in enumerate(found.group().lower())) % 996 + 1
            for _ in range(2 if ord(found.group()[0]) > 0xFFFF else 1):
                ids.append(number)
                offsets.append(found.span())
        return Tokens(ids, offsets)

    def hidden_states(self, ids: torch.Tensor, mask: Any, layers: Sequence[int]) -> dict[int, torch.Tensor]:
        return {layer: self.table[layer][ids] for layer in layers}


def table_grounder(layers: Sequence[int] = (2, 3), **settings: Any) -> Grounder:
    saes = {n: TopKSAE(WIDTH, D_SAE, K, generator=torch.Generator().manual_seed(n)).eval() for n in layers}
    return Grounder(Table(), saes, None, GroundingConfig(**settings))  # type: ignore[arg-type]


def inspect_state(grounder: Grounder, state: FactualState) -> Inspection:
    """A page's content without states on disk."""
    trace = grounder.trace(state)
    return Inspection(trace, record_of(ReflectiveState(trace.state, "She likes tea."), "test"))


def long_state(turns: int, words: int = 17) -> FactualState:
    """A dialogue of that many turns, all retrieved; every hundredth has a picture, every 37th is gold."""
    generator = torch.Generator().manual_seed(turns)
    said = []
    for n in range(turns):
        row = [WORDS[i] for i in torch.randint(0, len(WORDS), (words,), generator=generator).tolist()]
        images = (Image(n // 100, caption=f"a picture of {row[0]}"),) * (n % 100 == 0)
        said.append(Turn(f"s{n // 50}:{n}", ("Ana", "Ben")[n % 2], " ".join(row), images=images))
    gold = tuple(turn.id for turn in said[::37])
    question = Question("q-long", "long", "What does Ana like?", answers=("tea",), evidence=gold)
    strategy = Strategy(("Collect what is said about tea.",), speakers=("Ana",), entities=("tea", "cake"))
    talk = Dialogue("long", (Session("s", "2024-03-01", tuple(said)),))
    return FactualState(talk, question, (Segment(0, turns - 1),), strategy)


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens a page from disk; gives it with all that its console said and all that it fetched."""
    contexts = []

    def opened(path: Path) -> SimpleNamespace:
        contexts.append(browser.new_context(viewport={"width": 1280, "height": 900}))
        one = SimpleNamespace(page=contexts[-1].new_page(), said=[], fetched=[])
        one.page.set_default_timeout(60_000)
        one.page.on("console", lambda message: one.said.append(f"{message.type}: {message.text}"))
        one.page.on("pageerror", lambda error: one.said.append(f"error: {error}"))
        one.page.on("request", lambda request: one.fetched.append(request.url))
        one.page.goto(path.as_uri())
        one.page.wait_for_function("document.documentElement.dataset.ready === 'true'")
        return one

    yield opened
    for context in contexts:
        context.close()


def data_of(path: Path) -> Any:
    """What the script of a page reads."""
    return pages.data_of(path.read_text(encoding="utf-8"))
