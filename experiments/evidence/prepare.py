"""Everything the methods rank turns by, computed once per dialogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from experiments.evidence.data import DialogueQuestions
from experiments.evidence.resonance import QuestionCodes, encode_questions, salience
from remind.grounding.codes import WindowedCodes
from remind.grounding.config import GroundingConfig
from remind.grounding.fusion import TurnIndex
from remind.perception import Perception
from remind.states.pyramid import Strategy
from remind.text.words import stems

SCOPES = ("full", "retrieved")
#: Draws that the ratio of `random` is averaged over.
DRAWS = 8


@dataclass(frozen=True)
class View:
    """The turns at hand and what they are ranked by.

    Attributes:
        run: int64 [n, Q] or [n, 1], run of each turn; -1: not at hand.
        signals: [n, Q] by name: those of `fusion`, `dense_plain` and `bm25_plain` (the question as it is asked),
            `resonance/<match>/<layers>`, `random/<draw>`.
    """

    run: Tensor
    signals: dict[str, Tensor]


@dataclass(frozen=True)
class Prepared:
    """One dialogue with its questions, ready to be ranked.

    Attributes:
        cost: tokens of every turn's lines, int64 [n].
        views: by scope.
        strategies: of every question.
    """

    asked: DialogueQuestions
    cost: Tensor
    views: dict[str, View]
    codes: QuestionCodes
    strategies: tuple[Strategy, ...]


def resonance_name(match: str, layers: str) -> str:
    return f"resonance/{match}/{layers}"


def prepare(
    asked: DialogueQuestions, windowed: WindowedCodes, perception: Perception, config: GroundingConfig, seed: int = 0
) -> Prepared:
    """Encode the dialogue (windows of the backbone, turn vectors), retrieve for every question, score every turn.

    Args:
        config: settings of the resonance besides `match` and `layers`, of which all kinds are computed.
    """
    texts = [question.text for question in asked.questions]
    perception.encoder.encode(texts)  # together, so that perceive finds them encoded
    states = perception.perceive(asked.dialogue, asked.questions)
    codes = windowed.dialogue_codes(asked.dialogue)
    strategies = tuple(state.strategy for state in states)
    held = encode_questions(windowed.encoder, codes, asked.dialogue, texts, strategies)
    n = len(asked.dialogue.turns)
    retrieved = torch.full((n, len(texts)), -1)
    for column, state in enumerate(states):
        retrieved[torch.tensor(state.positions, dtype=torch.int64), column] = torch.tensor(state.runs)
    runs = {"full": asked.session_of[:, None], "retrieved": retrieved}
    cost = torch.bincount(codes.turn, minlength=n)
    common = {**_text_signals(asked, perception, texts), "length": cost.float().log1p()[:, None].expand(n, len(texts))}
    draws = torch.Generator().manual_seed(seed)
    common |= {f"random/{draw}": torch.rand(n, len(texts), generator=draws) for draw in range(DRAWS)}
    views = {scope: View(run, {**common, **resonances(held, config, run)}) for scope, run in runs.items()}
    return Prepared(asked, cost, views, held, strategies)


def _text_signals(asked: DialogueQuestions, perception: Perception, texts: Sequence[str]) -> dict[str, Tensor]:
    index = TurnIndex(asked.dialogue, perception.encoder)
    lexical = perception.index(asked.dialogue).bm25
    plain = torch.stack([torch.from_numpy(lexical.scores(stems(text))).float() for text in texts], 1)
    return {
        **index.signals(texts),
        "dense_plain": index.vectors @ perception.encoder.encode(texts).T,
        "bm25_plain": plain,
    }


def resonances(held: QuestionCodes, config: GroundingConfig, run: Tensor) -> dict[str, Tensor]:
    """Both kinds of match, over all layers and the last alone, by `resonance_name`; [n, Q] each."""
    every = sorted(held.dialogue.layers)
    kinds = {"all": every, "last": every[-1:]} if len(every) > 1 else {"last": every}
    return {
        resonance_name(match, name): salience(held, replace(config, match=match), run, layers)
        for match in ("summed", "each")
        for name, layers in kinds.items()
    }
