"""Give a model some features, or the whole stream, of another one: whether what training changed is the cause.

At the layers of the SAEs the activations of chosen features are replaced, token by token, by those of the other model
(the donor), h + Σ_j (z_j(donor) - z_j(h)) W_dec[j]; what no feature explains stays the recipient's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from remind.evaluation.likelihood import AnswerScore, score_answer
from remind.models.backbone import Backbone
from remind.viewing.diff import Diff, Reading
from sae import TopKSAE
from sae.hooks import edited

Edits = Mapping[int, Callable[[Tensor], Tensor]]
States = Mapping[int, Tensor]


def rankings(diff: Diff, saes: Mapping[int, TopKSAE], draws: int, seed: int) -> dict[str, list[list[tuple[int, int]]]]:
    """Features in the order in which they are patched, as (layer, feature).

    Args:
        diff: of questions that no answers are counted on.
        saes: those that the diff was measured with.
        draws: random orders.
        seed: of these.

    Returns:
        `changed`: by how much their mean contribution to the stream changed; `largest`: by that contribution itself;
        `random`: those that fire, in random orders. Of the first two there is one order each.
    """
    changed: list[tuple[float, int, int]] = []
    largest: list[tuple[float, int, int]] = []
    for layer, kinds in diff.changes.items():
        norms = torch.linalg.vector_norm(saes[layer].W_dec.detach().double().cpu(), dim=1)
        questions = max(kinds["answer"].questions, 1)
        for figures in (kinds["question"], kinds["answer"], kinds["dialogue"]):
            moved, size = (figures.after - figures.before).abs() * norms / questions, figures.after * norms / questions
            changed += [(float(value), layer, feature) for feature, value in enumerate(moved) if value > 0]
            largest += [(float(value), layer, feature) for feature, value in enumerate(size) if value > 0]
    orders: dict[str, list[list[tuple[int, int]]]] = {}
    for name, rows in (("changed", changed), ("largest", largest)):
        ranked = sorted(rows, key=lambda row: (-row[0], row[1], row[2]))
        orders[name] = [list(dict.fromkeys((layer, feature) for _, layer, feature in ranked))]
    active = sorted(set(orders["largest"][0]))
    generator = torch.Generator().manual_seed(seed)
    orders["random"] = [[active[n] for n in torch.randperm(len(active), generator=generator)] for _ in range(draws)]
    return orders


def patches(saes: Mapping[int, TopKSAE], features: Sequence[tuple[int, int]], donor: States) -> Edits:
    """Edits that give some features at every token the activations that they have in the donor's states.

    Args:
        features: (layer, feature).
        donor: [1, T, d] by layer.
    """
    edits: dict[int, Callable[[Tensor], Tensor]] = {}
    for layer, coder in saes.items():
        if numbers := [feature for at, feature in features if at == layer]:
            edits[layer] = _patch(coder, torch.tensor(numbers, device=coder.W_dec.device), donor[layer])
    return edits


def _patch(coder: TopKSAE, numbers: Tensor, donor: Tensor) -> Callable[[Tensor], Tensor]:
    wanted = coder.encode(donor).of(numbers, coder.d_sae)
    return lambda h: h + ((wanted - coder.encode(h).of(numbers, coder.d_sae)) @ coder.W_dec[numbers]).to(h)


def whole(donor: States) -> Edits:
    """An edit that puts the donor's stream [1, T, d] in place of the recipient's, at the deepest layer."""
    deepest = max(donor)
    return {deepest: lambda _: donor[deepest]}


def answer_score(backbone: Backbone, question: Reading, edits: Edits | None = None, *, level: int = 0) -> AnswerScore:
    """Read a state (x0 by default) and the gold answer, with the edits, and score the answer's tokens."""
    assert question.record.target is not None
    with edited(backbone.model, edits) if edits else nullcontext():
        return score_answer(backbone, question.prompts[level], question.answer, question.record.target)
