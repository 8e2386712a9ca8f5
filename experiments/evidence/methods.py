"""What turns are ranked by, computed once per dialogue; the methods compared, and the settings each may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from experiments.evidence.data import DialogueQuestions
from experiments.evidence.resonance import QuestionCodes, encode_questions, salience
from remind.grounding.codes import WindowedCodes
from remind.grounding.config import WEIGHTS, GroundingConfig
from remind.grounding.fusion import TurnIndex, around, design, fill_lowest, gaussian_shares
from remind.grounding.resonance import standardise_turns
from remind.models.encoder import SentenceEncoder
from remind.perception.auxiliary import OfflineLLM
from remind.perception.perceive import BM25
from remind.states.pyramid import Strategy, blind, turn_text
from remind.text.words import stems

#: Draws that the ratio of `random` is averaged over.
DRAWS = 8

BASELINES = ("random", "bm25", "dense", "bm25+dense")
METHODS = (*BASELINES, "resonance", "fused")
#: What the plain methods add up, and under the last name a stronger reading of both than `fused` is held against.
PARTS = {
    "bm25": ("bm25_plain",),
    "dense": ("dense_plain",),
    "bm25+dense": ("bm25_plain", "dense_plain"),
    "bm25+dense, names left out": ("bm25", "dense"),
}
#: Columns of the design that fused loses in each ablation.
ABLATIONS = {
    "fused without resonance": ("summed", "summed_context", "each", "each_context"),
    "fused without dense and bm25": ("dense", "dense_context", "bm25", "bm25_context"),
    "fused without facts of the turn": ("speaker", "date", "asks", "answers"),
}
SMOOTHINGS = ("window 0", "window 1", "window 2", "neighbours", "context")
#: Width in turns of `context`, the same for all methods.
SIGMA = 3.0


@dataclass(frozen=True)
class Prepared:
    """One dialogue with its questions, ready to be ranked.

    Attributes:
        cost: tokens of every turn's lines, int64 [n].
        run: session of every turn, int64 [n, 1].
        signals: [n, Q] by name: those of `fusion`, `dense_plain` and `bm25_plain` (the question as it is asked),
            `resonance/<match>/<layers>`, `random/<draw>`.
        strategies: of every question.
    """

    asked: DialogueQuestions
    cost: Tensor
    run: Tensor
    signals: dict[str, Tensor]
    codes: QuestionCodes
    strategies: tuple[Strategy, ...]


def resonance_name(match: str, layers: str) -> str:
    return f"resonance/{match}/{layers}"


def prepare(
    asked: DialogueQuestions, windowed: WindowedCodes, encoder: SentenceEncoder, config: GroundingConfig, seed: int = 0
) -> Prepared:
    """Encode the dialogue (windows of the backbone, turn vectors), and score every turn for every question.

    Args:
        config: settings of the resonance besides `match` and `layers`, of which all kinds are computed.
    """
    dialogue, texts = asked.dialogue, [question.text for question in asked.questions]
    strategies = tuple(OfflineLLM(encoder).strategies(dialogue, [blind(question) for question in asked.questions]))
    codes = windowed.dialogue_codes(dialogue)
    held = encode_questions(windowed.encoder, codes, dialogue, texts, strategies)
    n, run = len(dialogue.turns), asked.session_of[:, None]
    cost = torch.bincount(codes.turn, minlength=n)
    index, lexical = TurnIndex(dialogue, encoder), BM25([stems(turn_text(turn)) for turn in dialogue.turns])
    draws = torch.Generator().manual_seed(seed)
    signals = {
        **index.signals(texts),
        "dense_plain": index.vectors @ encoder.encode(texts).T,
        "bm25_plain": torch.stack([torch.from_numpy(lexical.scores(stems(text))).float() for text in texts], 1),
        "length": cost.float().log1p()[:, None].expand(n, len(texts)),
        **{f"random/{draw}": torch.rand(n, len(texts), generator=draws) for draw in range(DRAWS)},
        **resonances(held, config, run),
    }
    return Prepared(asked, cost, run, signals, held, strategies)


def resonances(held: QuestionCodes, config: GroundingConfig, run: Tensor) -> dict[str, Tensor]:
    """Both kinds of match, over all layers and the last alone, by `resonance_name`; [n, Q] each."""
    every = sorted(held.dialogue.layers)
    kinds = {"all": every, "last": every[-1:]} if len(every) > 1 else {"last": every}
    return {
        resonance_name(match, name): salience(held, replace(config, match=match), run, layers)
        for match in ("summed", "each")
        for name, layers in kinds.items()
    }


@dataclass(frozen=True)
class Setting:
    """How scores become a ranking.

    Attributes:
        smoothing: window w of the selection; `neighbours`, each turn lending half its score to those beside it; or
            `context`, the score plus the Gaussian mean around it, each standardised.
        thrift: taken off for each unit of ln(1 + tokens).
        resonance: which resonance; for `fused` its layers.
    """

    smoothing: str = "window 0"
    thrift: float = 0.0
    resonance: str = ""

    @property
    def window(self) -> int:
        return int(self.smoothing.split()[1]) if self.smoothing.startswith("window") else 0


def grid(method: str, resonances: Sequence[str]) -> list[Setting]:
    """The settings of a method, simplest first; a tie between them goes to the earlier."""
    if method == "random":
        return [Setting(smoothing) for smoothing in SMOOTHINGS[:3]]
    if method == "fused" or method in ABLATIONS:
        return [Setting(f"window {w}", thrift) for w, thrift in ((0, 0.5), (0, 0.75), (0, 1.0), (1, 0.75), (2, 0.75))]
    names = resonances if method == "resonance" else [""]
    return [Setting(s, thrift, name) for name in names for s in SMOOTHINGS for thrift in (0.0, 0.25, 0.5)]


def plain_scores(one: Prepared, names: Sequence[str], setting: Setting) -> Tensor:
    """Sum of the standardised signals, smoothed, less thrift; float32 [n, Q]."""
    inside = (one.run >= 0).expand_as(one.signals[names[0]])
    added = torch.stack([standardise_turns(fill_lowest(one.signals[name], inside), inside) for name in names]).sum(0)
    own = standardise_turns(added, inside)
    if setting.smoothing == "neighbours":
        own = around(own, one.run, [0.5])
    elif setting.smoothing == "context":
        own = own + standardise_turns(around(own, one.run, gaussian_shares(SIGMA)), inside)
    return own - setting.thrift * one.signals["length"]


def fused_scores(x: Tensor, weights: Tensor, setting: Setting) -> Tensor:
    """X w less thrift, [n, Q]; x: a design [n, Q, d]."""
    lengthless = weights.clone()
    lengthless[WEIGHTS.index("length")] -= setting.thrift
    return x @ lengthless


def design_of(one: Prepared, layers: str) -> Tensor:
    """The fused design with both resonances of the layers (`all` or `last`), [n, Q, d]."""
    both = {match: one.signals[resonance_name(match, layers)] for match in ("summed", "each")}
    return design({**one.signals, **both}, one.run, SIGMA)


def plain_ratio(one: Prepared, method: str, setting: Setting, budgets: Sequence[int]) -> np.ndarray:
    """Evidence ratio of a method without weights; float64 [Q, budgets]. Random: mean over its draws."""
    if method == "random":
        scores = [one.signals[f"random/{draw}"] for draw in range(DRAWS)]
    elif method == "resonance":
        scores = [plain_scores(one, [setting.resonance], setting)]
    else:
        scores = [plain_scores(one, PARTS[method], setting)]
    found = [evidence_ratio(s, one.run, one.cost, one.asked.gold, budgets, setting.window) for s in scores]
    return np.asarray(np.mean(found, axis=0))


def evidence_ratio(
    salience: Tensor, run: Tensor, cost: Tensor, gold: Sequence[Tensor], budgets: Sequence[int], window: int = 0
) -> np.ndarray:
    """Share of each question's gold turns that `select_blocks` would mark; float64 [Q, budgets].

    Args:
        salience: [n, Q]; -inf is never chosen.
        run: int64 [n, Q] or [n, 1]; -1: not at hand, so never marked.
        cost: int64 [n], tokens.
        gold: for each question positions of its gold turns.
        budgets: in tokens.
        window: turns on either side of a chosen one that are marked with it, in the same run.
    """
    n, questions = salience.shape
    scores = salience.float().numpy()
    runs = np.broadcast_to(run.numpy(), scores.shape)
    tokens = cost.double().numpy()
    scores = np.where(runs < 0, np.float32(-np.inf), scores)
    order = np.argsort(-scores, axis=0, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(n)[:, None], order.shape), axis=0)
    # a turn is marked with the first chosen turn whose window holds it; n: with none
    seed = np.where(scores == -np.inf, n, rank)
    covered = seed.copy()
    for step in range(1, min(window, n - 1) + 1):
        joined = (runs[step:] == runs[:-step]) & (runs[step:] >= 0)
        covered[step:] = np.where(joined, np.minimum(covered[step:], seed[:-step]), covered[step:])
        covered[:-step] = np.where(joined, np.minimum(covered[:-step], seed[step:]), covered[:-step])
    found = np.zeros((questions, len(budgets)))
    for q in range(questions):
        spent = np.bincount(covered[:, q], weights=tokens, minlength=n + 1)[:n].cumsum()
        last = np.searchsorted(spent, np.asarray(budgets, dtype=np.float64), side="right")
        places = covered[gold[q].numpy(), q]
        found[q] = ((places[:, None] < last[None]) & (places[:, None] < n)).mean(0)
    return found
