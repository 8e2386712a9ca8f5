"""RMM's reranker: two linear maps over the encoder's vectors, learned online from what answers cite.

Tan et al. 2025, "In Prospect and Retrospect: Reflective Memory Management for Long-term Personalized Dialogue Agents",
Section 6: adapted vectors (Eq. 1), Gumbel noise (Eq. 2), REINFORCE (Eq. 3). Where the paper is silent or not
consistent, this is what we do unless `as_printed` is set:

- The probability of a chosen set is not defined. Here it is Plackett-Luce's, of drawing the chosen memories in their
  order, which is what the best M of noisy scores are a draw from. As printed: the product of their softmax values of
  the noisy scores, the noise taken as a constant.
- R is a scalar in Eq. 3 and one value per memory in Section 6.2. Here each draw is credited with its own memory's.
- τ divides scores that carry their noise already, so that it changes no order; there is none but as printed.
- The dot products of unit vectors hardly differ: among the nearest 20 turns the policy would be almost uniform. `scale`
  multiplies them.
- b is a running mean of the rewards; the paper has 0.5.
- Section 8.6 trains a retriever on labels before it is refined. `pretrain` trains the linear maps so; the retriever
  stays as it is.
- Optimiser and start: plain SGD over the mean of a batch, and zeros, from where the ranking is exactly the retriever's.
- A.1 calls the reranker an MLP; it is linear here, as in Eq. 1.
- Whether users are answered from samples is not said. `explore` is the share of retrievals that are, and that are
  learned from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from remind.core.errors import ConfigError, DataError
from sae.ranges import NonNegativeInt, PositiveFloat, PositiveInt, Seed, Share, ShareBelowOne, check_ranges

NAME = "reranker.safetensors"
#: Learning rates that suit each kind of candidates; chosen on LoCoMo.
_RATES = {"dense": 1e-2, "hybrid": 3e-3, "bank": 1e-2}
#: Scale, η, b and τ of Eq. 1-3 and A.1.
_SCALE, _RATE, _BASELINE, _TAU = 1.0, 1e-3, 0.5, 0.5


@dataclass(frozen=True)
class RerankerConfig:
    """How memories are reranked and what is learned from citations."""

    as_printed: bool = False
    """Eq. 1-3 and A.1 read literally. Sets scale to 1 and, where it is not given, lr to 0.001."""
    pretrain: NonNegativeInt = 0
    """Epochs of supervised contrastive learning on each batch, in place of Eq. 3 (Section 8.6): nothing is sampled, and
    the softmax share of the cited memories among the candidates rises. With scope shared and gold citations, for
    weights that other runs begin with. The paper has 10, with batches of 32. 0: Eq. 3."""
    candidates: Literal["dense", "hybrid", "bank"] = "dense"
    """Where the candidates come from. hybrid: they bring logits of their own, and what is learned is added to them.
    bank: every memory is one, whatever top_k says."""
    top_k: PositiveInt = 20
    """K, candidates to rerank."""
    top_m: PositiveInt = 5
    """M, memories that are shown."""
    scale: PositiveFloat = 20.0
    """Multiplies the dot products; for unit vectors."""
    ema: ShareBelowOne = 0.95
    """Share of the old value in the running mean, per batch."""
    lr: PositiveFloat | None = None
    """η of Eq. 3. None: 0.01, with hybrid candidates 0.003."""
    batch: PositiveInt = 4
    """Episodes per update."""
    explore: Share = 1.0
    """Share of retrievals that are samples, and that are learned from. 1: the paper's; 0: nothing is learned."""
    seed: Seed = 0
    """Of the noise, together with the name of the retrieval."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
        object.__setattr__(self, "scale", _SCALE if self.as_printed else self.scale)
        object.__setattr__(self, "lr", self.lr or (_RATE if self.as_printed else _RATES[self.candidates]))


@dataclass(frozen=True)
class Episode:
    """A retrieval with what became of it.

    Attributes:
        query: [d]. memories: the candidates [K, d]. base: logits they came with [K].
        order: positions of the shown among the candidates, in the order they were drawn, int64 [M].
        rewards: of every shown memory [M]; +1 if the answer cites it, else −1 (Section 6.2).
        noise: g of Eq. 2 for every candidate [K]; of use as printed alone.
    """

    query: np.ndarray
    memories: np.ndarray
    order: np.ndarray
    rewards: np.ndarray
    base: np.ndarray
    noise: np.ndarray | float = 0.0


class Reranker:
    """q′ = q + W_q q, m′ = m + W_m m (Eq. 1), logits s = scale · q′ᵀm′, and the policy over s.

    Args:
        dimension: d of the encoder's vectors.
        dtype: of the weights.

    Attributes:
        w_q, w_m: [d, d], zeros at first.
        ema: running mean of the rewards; None before the first update.
        step: updates so far.
    """

    def __init__(self, config: RerankerConfig, dimension: int, dtype: type[np.floating[Any]] = np.float32) -> None:
        self.config, self.dimension = config, dimension
        self.w_q = np.zeros((dimension, dimension), dtype)
        self.w_m = np.zeros((dimension, dimension), dtype)
        self.ema: float | None = None
        self.step = 0

    def scores(self, query: np.ndarray, memories: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Logits s of the candidates, float64 [K]: base + scale · (q′ᵀm′ − qᵀm).

        Args:
            query: unit vector [d]. memories: unit rows [K, d]. base: logits [K]; of dense candidates scale · qᵀm.
        """
        # q′ᵀ(m + W_m m) = (q′ + W_mᵀ q′)ᵀ m: one product with the candidates
        change = self.w_q @ query
        learned = memories @ (self.w_m.T @ (query + change) + change)
        return self.config.scale * learned.astype(np.float64) + base

    def noise(self, name: str, count: int) -> np.ndarray | None:
        """g of Eq. 2 for that many candidates, float64 [K]; None for the share of names that is not explored.

        Args:
            name: of the retrieval; the same one always gives the same noise.
        """
        digest = hashlib.sha256(f"{self.config.seed} {name}".encode()).digest()
        draws = np.random.default_rng(int.from_bytes(digest[:16], "little"))
        return draws.gumbel(size=count) if draws.random() < self.config.explore else None

    def learn(self, episodes: Sequence[Episode]) -> None:
        """One step of Eq. 3 over a batch: the mean of η (R − b) ∇ log P. Or as many as `pretrain` has of contrastive
        learning, on the episodes that cite anything.

        Raises:
            ConfigError: a gradient that is not finite. Nothing has changed then but by the steps before.
        """
        if self.config.pretrain:
            cited = [episode for episode in episodes if (episode.rewards > 0).any()]
            for _ in range(self.config.pretrain if cited else 0):
                self._ascend(cited, [self.contrast(episode) for episode in cited])
        else:
            mean = float(np.mean([episode.rewards.mean() for episode in episodes]))
            known = mean if self.ema is None else self.ema
            baseline = _BASELINE if self.config.as_printed else known
            self._ascend(episodes, [self.coefficients(episode, baseline) for episode in episodes])
            # after the step: a baseline that knows the rewards it is taken from biases the gradient, if only the first
            self.ema = self.config.ema * known + (1 - self.config.ema) * mean
        self.step += 1

    def _ascend(self, episodes: Sequence[Episode], slopes: Sequence[np.ndarray]) -> None:
        adapted, queries, probes, values = factors = self.gradient(episodes, slopes)
        if not all(np.isfinite(factor).all() for factor in factors):
            raise ConfigError(f"the reranker's gradient is not finite at step {self.step}; lower lr")
        rate = self.w_q.dtype.type(self.config.lr)
        self.w_q += (rate * adapted).T @ queries
        self.w_m += (rate * probes).T @ values

    def contrast(self, episode: Episode) -> np.ndarray:
        """The derivative of the mean log softmax share of the cited memories by the logits, float64 [K]."""
        cited = episode.order[episode.rewards > 0]
        found = -_softmax(self.scores(episode.query, episode.memories, episode.base))
        found[cited] += 1 / len(cited)
        return found

    def coefficients(self, episode: Episode, baseline: float) -> np.ndarray:
        """c = Σ_j (R_j − b) ∂ log P_j/∂s, float64 [K]: the derivative of Eq. 3 by the logits.

        P_j, the probability of the j-th draw, is the softmax of s over the candidates not yet drawn; as printed that of
        (s + g)/τ over all candidates.
        """
        order, weights = episode.order, episode.rewards - baseline
        printed, scores = self.config.as_printed, self.scores(episode.query, episode.memories, episode.base)
        logits = np.tile((scores + episode.noise) / _TAU if printed else scores, (len(order), 1))
        for draw, position in enumerate(order[:-1] if not printed else ()):
            logits[draw + 1 :, position] = -np.inf
        found = np.asarray(-weights @ _softmax(logits))
        found[order] += weights
        return found / _TAU if printed else found

    def gradient(self, episodes: Sequence[Episode], slopes: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """Factors (a, q, p, v), each [B, d], of the mean gradient: ∇W_q = aᵀq, ∇W_m = pᵀv.

        From the derivatives c by the logits: v = Σ c_i m_i, a = scale/B · (v + W_m v) = scale/B · Σ c_i m′_i, and
        p = scale/B · q′. They are not multiplied out, which is most of the work of a step.
        """
        dtype = self.w_q.dtype
        queries = np.stack([episode.query for episode in episodes]).astype(dtype)
        values = np.stack([slope @ one.memories for one, slope in zip(episodes, slopes, strict=True)]).astype(dtype)
        share = dtype.type(self.config.scale / len(episodes))
        probes = share * (queries + queries @ self.w_q.T)
        return share * (values + values @ self.w_m.T), queries, probes, values

    def dump(self) -> bytes:
        """Weights and state as safetensors."""
        state = {"config": asdict(self.config), "ema": self.ema, "step": self.step}
        return save({"w_q": self.w_q, "w_m": self.w_m}, {"reranker": json.dumps(state)})

    @classmethod
    def load(cls, data: bytes, config: RerankerConfig, dimension: int, path: Path) -> Reranker:
        """What `dump` wrote, to go on with.

        Args:
            path: named in errors.

        Raises:
            DataError: it cannot be read, or is for other candidates, another scale or dimension.
        """
        try:
            tensors, end = load(data), 8 + int.from_bytes(data[:8], "little")
            state = json.loads(json.loads(data[8:end])["__metadata__"]["reranker"])
            found = cls(config, dimension)
            found.w_q, found.w_m, found.ema, found.step = tensors["w_q"], tensors["w_m"], state["ema"], state["step"]
            have = (state["config"]["candidates"], state["config"]["scale"], len(found.w_q))
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"not a reranker that can be read: {error}", path) from None
        wanted = (config.candidates, config.scale, dimension)
        if have != wanted:
            words = "{} candidates, scale {:g} and dimension {}"
            raise DataError(f"the weights are for {words.format(*have)}, not for {words.format(*wanted)}", path)
        return found


def _softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(chances / chances.sum(-1, keepdims=True))
