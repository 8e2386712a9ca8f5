"""One question: the change of the answer's log-probability after each edit of its x0 prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from experiments.faithfulness.ablation import ablated_logprob, guidance_features
from experiments.faithfulness.config import FaithfulnessConfig
from experiments.faithfulness.logprob import answer_logprobs, target_ids
from experiments.faithfulness.turns import fill, marked_turns, only_turns, without_turns
from remind.grounding.config import GroundingConfig
from remind.models.chat import prompt_ids
from remind.states.records import StateRecord
from remind.viewing.turns import Prompt, answer_tokens, evidence_turns, prompt_of
from sae import TopKSAE

if TYPE_CHECKING:
    from remind.grounding.codes import SparseEncoder
    from remind.models.backbone import Backbone

#: What a log-probability is given as: of the whole target, per target token, of what stands between the answer tags.
SCORES = ("sum", "per_token", "answer")
Row = dict[str, Any]


@dataclass(frozen=True)
class Ablation:
    """SAEs of the model, and what gives the guidance."""

    saes: Mapping[int, TopKSAE]
    encoder: SparseEncoder
    idf: Mapping[int, Tensor]
    config: GroundingConfig


@dataclass(frozen=True)
class Question:
    """A question that can be measured: its located prompt, and turns by who chose them (indices into x0's turns)."""

    record: StateRecord
    prompt: Prompt
    target: list[int]
    marked: list[int]
    unmarked: list[int]

    @property
    def budget(self) -> int:
        """Tokens of the marked turns."""
        return sum(self.prompt.sizes[turn] for turn in self.marked)


def question_of(tokenizer: Any, record: StateRecord, max_length: int) -> Question | str:
    """The question, or why it says nothing.

    `no_target`: no gold answer. `no_marks`: nothing is marked. `few_unmarked`: the unmarked turns hold fewer tokens
    than the marked ones, so that no control has as many. `too_long`: it does not fit the model.
    """
    if record.target is None:
        return "no_target"
    marked = marked_turns(record)
    if not marked:
        return "no_marks"
    prompt = prompt_of(tokenizer, record.x0)
    target = target_ids(tokenizer, record.target)
    if len(prompt.ids) + len(target) > max_length:
        return "too_long"
    unmarked = sorted(set(range(prompt.n_turns)) - set(marked))
    question = Question(record, prompt, target, marked, unmarked)
    if sum(prompt.sizes[turn] for turn in unmarked) < question.budget:
        return "few_unmarked"
    return question


def random_sets(question: Question, draws: int, seed: int) -> list[list[int]]:
    """Sets of unmarked turns with about as many tokens as the marked ones; they depend on seed and question alone."""
    digest = hashlib.sha256(f"{seed}:{question.record.question_id}".encode()).digest()
    dice = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    sizes = question.prompt.sizes
    return [fill(dice.permutation(question.unmarked).tolist(), sizes, question.budget) for _ in range(draws)]


def measure(backbone: Backbone, question: Question, cfg: FaithfulnessConfig, ablation: Ablation | None = None) -> Row:
    """The row of one question.

    Returns:
        `logprob`: `SCORES` under x0. `changes`: for `removed`, `kept` (all other turns removed) and `ablated`, by
        chooser (marked, random, evidence, all), `SCORES` minus those under x0, and `tokens`, how many were taken out,
        left in the turns or edited. `random` is the mean over the draws, each with about as many tokens as the marked
        turns; `evidence` is the gold turns, however many.
    """
    record, prompt, target = question.record, question.prompt, question.target
    sets = {"marked": [question.marked], "random": random_sets(question, cfg.draws, cfg.seed)}
    if evidence := evidence_turns(record):
        sets["evidence"] = [evidence]
    texts = {
        "removed": {name: [without_turns(record.x0, turns) for turns in chosen] for name, chosen in sets.items()},
        "kept": {name: [only_turns(record.x0, turns) for turns in chosen] for name, chosen in sets.items()},
    }
    texts["removed"]["all"] = [only_turns(record.x0, [])]

    # different choosers often agree; each prompt is read once
    unique = list(dict.fromkeys([record.x0.text, *(t for kind in texts.values() for c in kind.values() for t in c)]))
    ids = [prompt_ids(backbone.tokenizer, text) for text in unique]
    outputs = answer_logprobs(backbone, ids, target, cfg.batch_size)
    values = {text: _scores(backbone, record, value) for text, value in zip(unique, outputs, strict=True)}
    lengths = {text: len(tokens) for text, tokens in zip(unique, ids, strict=True)}
    base, whole, empty = values[record.x0.text], lengths[record.x0.text], lengths[only_turns(record.x0, [])]
    counts: dict[str, Callable[[str], int]] = {
        "removed": lambda text: whole - lengths[text],
        "kept": lambda text: lengths[text] - empty,
    }
    changes: dict[str, dict[str, Row]] = {
        kind: {name: _mean([_change(values[t], base, counts[kind](t)) for t in chosen]) for name, chosen in by.items()}
        for kind, by in texts.items()
    }
    n_features: dict[str, int] = {}
    if ablation is not None:
        features = guidance_features(ablation.encoder, record.x0, ablation.config, ablation.idf, cfg.features)
        n_features = {str(layer): len(chosen) for layer, chosen in features.items()}
        if any(features.values()):
            changes["ablated"] = _ablated(backbone, question, base, sets, features, ablation.saes)
    return {
        "question_id": record.question_id,
        "dialogue_id": record.dialogue_id,
        "format": record.format,
        "dimension": record.dimension,
        "category": record.category,
        "tokens": {
            "prompt": len(prompt.ids),
            "turns": sum(prompt.sizes),
            "marked": question.budget,
            "target": len(target),
        },
        "logprob": base,
        "changes": changes,
        "turns": {
            name: [record.x0.turns[turn].turn_id for turn in chosen[0]]
            for name, chosen in sets.items()
            if name != "random"
        },
        "features": n_features,
    }


def _ablated(
    backbone: Backbone,
    question: Question,
    base: Row,
    sets: Mapping[str, Sequence[Sequence[int]]],
    features: Mapping[int, Sequence[int]],
    saes: Mapping[int, TopKSAE],
) -> dict[str, Row]:
    """What ablation on marked and on random turns does."""
    sizes, changes = question.prompt.sizes, {}
    for name in ("marked", "random"):
        rows = []
        for turns in sets[name]:
            value = ablated_logprob(backbone, saes, features, question.prompt, turns, question.target)
            tokens = sum(sizes[turn] for turn in turns)
            rows.append(_change(_scores(backbone, question.record, value), base, tokens))
        changes[name] = _mean(rows)
    return changes


def _scores(backbone: Backbone, record: StateRecord, value: Tensor) -> Row:
    assert record.target is not None
    value = value.double()
    inside = answer_tokens(backbone.tokenizer, record.target)
    return {"sum": float(value.sum()), "per_token": float(value.mean()), "answer": float(value[inside].sum())}


def _change(after: Row, before: Row, tokens: int) -> Row:
    return {**{name: after[name] - before[name] for name in SCORES}, "tokens": tokens}


def _mean(rows: Sequence[Row]) -> Row:
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
