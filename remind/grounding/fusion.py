"""One salience per turn from resonance and retrieval together (`fuse`), and resonance word by word (`match_each`).

Neither is in the paper, whose salience is resonance alone (Eq. 5). `fuse` standardises every score over the turns at
hand and weighs it twice, as it stands and averaged over the turns around; a few plain facts of a turn are added.

Eq. 4 adds all strategy tokens up into one guidance vector, in which a common word weighs as much as a telling one that
half the turns lack. `match_each` instead looks for each question token's best partner in the turn, and counts by how
far that partner stands out among the turns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from remind.data.dialogue import Dialogue
from remind.grounding.codes import SparseEncoder
from remind.grounding.config import FACTS, SCORES, WEIGHTS, FusionConfig
from remind.grounding.resonance import standardise_turns
from remind.perception.perceive import BM25
from remind.states.pyramid import one_line, turn_text
from remind.text.days import Span, day_of, spans
from remind.text.words import stems, target_speakers, word_list, words
from sae import SparseCodes

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder


def gaussian_shares(sigma: float) -> list[float]:
    """Weights of the neighbours 1, 2, … ceil(3σ) turns away, the turn itself weighing 1."""
    return [math.exp(-0.5 * (step / sigma) ** 2) for step in range(1, math.ceil(3 * sigma) + 1)]


def around(scores: Tensor, run: Tensor, shares: Sequence[float]) -> Tensor:
    """Weighted mean of each turn and its neighbours in the same run.

    Where the run ends only the turns that are there count, so that an edge is not drawn towards zero.

    Args:
        scores: [n, Q].
        run: int64 [n, Q] or [n, 1], run of each turn, equal numbers standing together; -1: not at hand.
        shares: weight of a turn 1, 2, … places away, the turn itself weighing 1.
    """
    total, weight = scores.clone(), torch.ones_like(scores)
    for step, share in enumerate(shares[: len(scores) - 1], start=1):
        joined = share * ((run[step:] == run[:-step]) & (run[step:] >= 0)).to(scores.dtype)
        total[step:] += joined * scores[:-step]
        total[:-step] += joined * scores[step:]
        weight[step:] += joined
        weight[:-step] += joined
    return total / weight


def fill_lowest(scores: Tensor, inside: Tensor) -> Tensor:
    """-inf (a turn without tokens) replaced by the lowest score there is among the turns inside, else by 0."""
    known = scores.isfinite()
    lowest = torch.where(inside.expand_as(scores) & known, scores, torch.inf).amin(0)
    return torch.where(known, scores, torch.where(lowest.isfinite(), lowest, 0.0))


def design(signals: Mapping[str, Tensor], run: Tensor, sigma: float) -> Tensor:
    """What the weights multiply, in the order of `WEIGHTS`; float32 [n, Q, len(WEIGHTS)].

    Args:
        signals: [n, Q] by name, of `SCORES` and `FACTS`; one that is missing counts as 0.
        run: as in `around`. Turns that are not at hand (-1) count in no mean, deviation or neighbourhood.
    """
    nothing = torch.zeros_like(next(iter(signals.values())), dtype=torch.float32)
    inside = (run >= 0).expand_as(nothing)
    columns = []
    for name in SCORES:
        if name in signals:
            own = standardise_turns(fill_lowest(signals[name].float(), inside), inside)
            columns += [own, standardise_turns(around(own, run, gaussian_shares(sigma)), inside)]
        else:
            columns += [nothing, nothing]
    columns += [signals[name].float() if name in signals else nothing for name in FACTS]
    return torch.stack(columns, -1)


def fuse(signals: Mapping[str, Tensor], run: Tensor, config: FusionConfig) -> Tensor:
    """The fused salience; float32 [n, Q]. Arguments as in `design`."""
    return design(signals, run, config.sigma) @ torch.tensor([getattr(config, name) for name in WEIGHTS])


def name_words(dialogue: Dialogue) -> frozenset[str]:
    """Words of the speakers' names. Every line begins with one, so they do not distinguish turns."""
    parts = {part for speaker in dialogue.speakers for part in words(speaker)}
    return frozenset(parts | {part + "s" for part in parts})


def skipped_words(dialogue: Dialogue) -> frozenset[str]:
    """Function words, words that only make a question, and speakers' names."""
    return word_list("stopwords") | word_list("question") | name_words(dialogue)


def content_tokens(text: str, offsets: Sequence[tuple[int, int]], skip: frozenset[str]) -> list[bool]:
    """Whether each token belongs to a word that is not skipped; all tokens where every word is.

    Args:
        offsets: character spans in `text`.
    """
    kept = [match.span() for match in re.finditer(r"\w+", text) if match.group().lower() not in skip]
    inside = [any(first < end and start < stop for first, stop in kept) for start, end in offsets]
    return inside if any(inside) else [True] * len(inside)


def question_codes(
    encoder: SparseEncoder, dialogue: Dialogue, questions: Sequence[str]
) -> tuple[dict[int, SparseCodes], Tensor]:
    """Codes of the content tokens of each question; speakers' names, function and question words have none.

    Returns:
        Layer to [tokens, k]; number of the question of each token, int64 [tokens], ascending.
    """
    skip = skipped_words(dialogue)
    ids, kept, owners = [], [], []
    for number, question in enumerate(map(one_line, questions)):
        tokens = encoder.backbone.tokenize(question)
        length = min(len(tokens.ids), encoder.max_tokens)
        ids.append(tokens.ids[:length])
        kept += content_tokens(question, tokens.offsets[:length], skip)
        owners += [number] * length
    codes = encoder.encode([one for one in ids if one])
    inside = torch.tensor(kept, dtype=torch.bool)
    return {layer: found[inside] for layer, found in codes.items()}, torch.tensor(owners, dtype=torch.int64)[inside]


def unit_features(codes: SparseCodes, idf: Tensor) -> SparseCodes:
    """Activations as √(idf · h̃), so that a product of two is idf · √(h̃ h̃'), and rows of length 1 (or 0)."""
    active = codes.values > 0
    weights = idf.clamp(min=0)[torch.where(active, codes.indices, 0)]
    values = torch.where(active, codes.values.float() * weights, 0.0).sqrt()
    length = values.square().sum(-1, keepdim=True).sqrt()
    return SparseCodes(values / length.clamp(min=1e-12), codes.indices)


def best_partners(codes: SparseCodes, turn: Tensor, n_turns: int, query: SparseCodes, idf: Tensor) -> Tensor:
    """Largest similarity (0 to 1) of each query token to any token of each turn; float32 [n_turns, query tokens].

    Args:
        codes: [T, k]. turn: int64 [T], ascending, turn of each token; -1: of none.
        query: [·, k]. idf: [d_sae].
    """
    inside = turn >= 0
    rows, tokens = unit_features(codes[inside], idf), unit_features(query, idf)
    lengths = torch.bincount(turn[inside], minlength=n_turns)
    if not len(tokens.values) or not int(lengths.sum()):
        return torch.zeros(n_turns, len(tokens.values))
    table = torch.zeros(len(idf), len(tokens.values))
    table.scatter_add_(0, tokens.indices.T, tokens.values.T)
    products = F.embedding_bag(rows.indices, table, per_sample_weights=rows.values, mode="sum")
    return torch.segment_reduce(products, "max", lengths=lengths, unsafe=True, initial=0.0)


def match_each(partners: Tensor, owner: Tensor, inside: Tensor) -> Tensor:
    """Salience by words: Σ over a question's tokens of (best partner − its mean over the turns at hand)²; [n, Q].

    Only what a turn has above the mean counts.

    Args:
        partners: [n, tokens] from `best_partners`.
        owner: int64 [tokens], question of each token.
        inside: bool [n, Q] or [n, 1]: the turns at hand; others get 0.
    """
    questions = inside.shape[1] if inside.shape[1] > 1 else int(owner.max()) + 1 if len(owner) else 1
    whole = inside.expand(-1, questions)
    held = whole[:, owner].float()
    mean = (partners * held).sum(0) / held.sum(0).clamp(min=1)
    excess = (partners - mean).clamp(min=0).square() * held
    return torch.zeros(len(partners), questions).index_add_(1, owner, excess)


class TurnIndex:
    """A dialogue as retrieval reads it, made once for all its questions.

    Args:
        dialogue: n turns.
        encoder: gives the vectors of turns and questions.
    """

    def __init__(self, dialogue: Dialogue, encoder: SentenceEncoder) -> None:
        self.dialogue, self.encoder = dialogue, encoder
        self.skipped = skipped_words(dialogue)
        texts = [turn_text(turn) for turn in dialogue.turns]
        sessions = [number for number, session in enumerate(dialogue.sessions) for _ in session.turns]
        self.vectors = encoder.encode(texts)
        self.stems = BM25([stems(text, self.skipped) for text in texts])
        self.asks = torch.tensor([float("?" in turn.text) for turn in dialogue.turns])
        follows = torch.tensor([n > 0 and sessions[n] == sessions[n - 1] for n in range(len(texts))])
        self.answers = torch.where(follows, self.asks.roll(1), 0.0)
        self.days = turn_days(dialogue)
        self.latest = max(filter(None, self.days), default=None)

    def signals(self, questions: Sequence[str]) -> dict[str, Tensor]:
        """Scores of every turn for each question, float32 [n, len(questions)].

        dense: cosine of the turn (its line and captions) and the question less speakers' names. bm25: over stems,
        without names, function and question words.
        speaker: 1 where the turn's speaker is named. date: see `closeness`. asks: 1 for a turn with a question mark,
        answers: for the one after it.
        """
        names = name_words(self.dialogue)
        texts, columns = [], []
        for question in questions:
            kept = [word for word in question.split() if re.sub(r"(?:['’]s)?\W*$", "", word.lower()) not in names]
            texts.append(" ".join(kept) or question)
            named = target_speakers(self.dialogue, question)
            column = {
                "bm25": torch.as_tensor(self.stems.scores(stems(question, self.skipped)), dtype=torch.float32),
                "speaker": torch.tensor([float(turn.speaker in named) for turn in self.dialogue.turns]),
                "date": closeness(self.days, [*spans(question, None, self.latest)]),
            }
            columns.append(column | {"asks": self.asks, "answers": self.answers})
        dense = self.vectors @ self.encoder.encode(texts).T
        return {"dense": dense} | {name: torch.stack([one[name] for one in columns], 1) for name in columns[0]}


#: Days from a named day at which a turn still counts by half: what is told the day after, and time zones.
NEAR = 2


def turn_days(dialogue: Dialogue) -> list[date | None]:
    """The day of every turn: its own, else its session's; None where neither is ISO 8601."""
    return [day_of(turn.time) or day_of(session.time) for session in dialogue.sessions for turn in session.turns]


def closeness(days: Sequence[date | None], asked: Sequence[Span]) -> Tensor:
    """For each day 1 if it is one of those asked about, 0.5 within `NEAR` days of a single one, else 0; [n]."""

    def close(day: date) -> float:
        away = [(max(one.start - day, day - one.end).days, one.start == one.end) for one in asked]
        return max((1.0 if days <= 0 else 0.5 * (single and days <= NEAR) for days, single in away), default=0.0)

    return torch.tensor([close(day) if day else 0.0 for day in days])
