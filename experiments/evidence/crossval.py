"""Leave one dialogue out: settings chosen on the other dialogues of all datasets, ratios of the one left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from experiments.evidence.methods import (
    ABLATIONS,
    METHODS,
    PARTS,
    Prepared,
    Setting,
    design_of,
    evidence_ratio,
    fused_scores,
    grid,
    plain_ratio,
)
from remind.core.progress import track
from remind.grounding.config import WEIGHTS


@dataclass(frozen=True)
class Choice:
    """What a fold chose: by method and budget a setting, and the fused weights."""

    settings: dict[str, dict[int, Setting]]
    weights: dict[str, float]


def dataset_mean(values: Sequence[np.ndarray], datasets: Sequence[str]) -> np.ndarray:
    """Mean over questions of each dialogue's ratios [Q, budgets], every dataset weighing the same; [budgets]."""
    shares = question_shares(datasets, [len(v) for v in values])
    return np.asarray(sum(share * v.sum(0) for share, v in zip(shares, values, strict=True)))


def best_settings(
    table: Mapping[Setting, Sequence[np.ndarray]], datasets: Sequence[str], train: Sequence[int]
) -> list[Setting]:
    """For each budget the setting with the best mean on the dialogues `train`.

    Args:
        table: setting → for each dialogue its ratios [Q, budgets].
        datasets: of each dialogue.
    """
    options, names = list(table), [datasets[n] for n in train]
    means = np.stack([dataset_mean([table[s][n] for n in train], names) for s in options])
    return [options[int(np.argmax(np.round(column, 12)))] for column in means.T]


class CrossValidation:
    """Ratios of every method, each dialogue under settings chosen without it.

    Args:
        dialogues: all of them, all datasets.
        budgets: in tokens.
        main: the budget by which the layers of the resonances that enter `fused` are chosen.
    """

    def __init__(self, dialogues: Sequence[Prepared], budgets: Sequence[int], main: int) -> None:
        self.dialogues, self.budgets, self.main = list(dialogues), list(budgets), main
        self.resonances = [name for name in self.dialogues[0].signals if name.startswith("resonance/")]
        self.plain = [*(m for m in METHODS if m != "fused"), *(m for m in PARTS if m not in METHODS)]
        self._designs: dict[str, list[Tensor]] = {}
        jobs = [(method, setting) for method in self.plain for setting in grid(method, self.resonances)]
        self._plain = {
            (method, setting): [plain_ratio(one, method, setting, self.budgets) for one in self.dialogues]
            for method, setting in track(jobs, "rank", len(jobs))
        }

    def run(self) -> dict[str, list[np.ndarray]]:
        """Method → for each dialogue its held-out ratios [Q, budgets]."""
        ratios: dict[str, list[np.ndarray]] = {}
        everyone = range(len(self.dialogues))
        for held in track(everyone, "folds", len(everyone)):
            for method, values in self.fold([n for n in everyone if n != held], [held])[0].items():
                ratios.setdefault(method, []).extend(values)
        return ratios

    def all_dialogues(self) -> tuple[dict[str, list[np.ndarray]], Choice]:
        """Settings chosen on all dialogues, and the ratios of these same ones."""
        everyone = list(range(len(self.dialogues)))
        return self.fold(everyone, everyone)

    def fold(self, train: Sequence[int], test: Sequence[int]) -> tuple[dict[str, list[np.ndarray]], Choice]:
        """Choose on `train`, measure on `test`."""
        settings: dict[str, dict[int, Setting]] = {}
        ratios: dict[str, list[np.ndarray]] = {}

        def choose(method: str, table: Mapping[Setting, Sequence[np.ndarray]]) -> None:
            """The best setting at each budget on `train`, and what it gives on `test`."""
            best = best_settings(table, [one.asked.dataset for one in self.dialogues], train)
            settings[method] = dict(zip(self.budgets, best, strict=True))
            ratios[method] = [np.stack([table[setting][n][:, b] for b, setting in enumerate(best)], 1) for n in test]

        for method in self.plain:
            choose(method, {s: self._plain[method, s] for s in grid(method, self.resonances)})
        layers = settings["resonance"][self.main].resonance.split("/")[-1]
        weights = {}
        for method in ("fused", *ABLATIONS):
            w = self._fit(layers, train, ABLATIONS.get(method, ()))
            if method == "fused":
                weights = dict(zip(WEIGHTS, w.tolist(), strict=True))
            choose(method, {s: self._fused(layers, w, s) for s in grid(method, self.resonances)})
        settings["fused"] = {budget: replace(one, resonance=layers) for budget, one in settings["fused"].items()}
        return ratios, Choice(settings, weights)

    def _design(self, layers: str) -> list[Tensor]:
        if layers not in self._designs:
            self._designs[layers] = [design_of(one, layers) for one in self.dialogues]
        return self._designs[layers]

    def _fit(self, layers: str, train: Sequence[int], without: Sequence[str]) -> Tensor:
        designs = self._design(layers)
        asked = [self.dialogues[n].asked for n in train]
        shares = question_shares([one.dataset for one in asked], [len(one.questions) for one in asked])
        columns = [place for place, name in enumerate(WEIGHTS) if name not in without]
        return fit_weights([designs[n] for n in train], [one.gold for one in asked], shares, columns=columns)

    def _fused(self, layers: str, weights: Tensor, setting: Setting) -> list[np.ndarray]:
        found = []
        for one, x in zip(self.dialogues, self._design(layers), strict=True):
            scores = fused_scores(x, weights, setting)
            found.append(evidence_ratio(scores, one.run, one.cost, one.asked.gold, self.budgets, setting.window))
        return found


def fit_weights(
    designs: Sequence[Tensor],
    gold: Sequence[Sequence[Tensor]],
    share: Sequence[float],
    ridge: float = 1e-3,
    columns: Sequence[int] | None = None,
) -> Tensor:
    """Weights w that make the gold turns likely: each question draws one of its turns with softmax(X w), a gold one.

    Minimises Σ share · mean over gold turns of −log p(turn), plus ridge · |w|², by L-BFGS from 0. It is convex.

    Args:
        designs: for each dialogue X [n, Q, d].
        gold: for each dialogue and question positions of the gold turns.
        share: for each dialogue the weight of one of its questions.
        columns: which of the d columns have a weight; the others get 0. None: all.

    Returns:
        float32 [d].
    """
    d = designs[0].shape[-1]
    kept = list(range(d)) if columns is None else list(columns)
    xs = [x if columns is None else x[..., kept] for x in designs]
    targets = []
    for x, found in zip(xs, gold, strict=True):
        target = torch.zeros(x.shape[:2])
        for q, turns in enumerate(found):
            target[turns, q] = 1 / len(turns)
        targets.append(target)
    w = torch.zeros(len(kept), requires_grad=True)
    optimiser = torch.optim.LBFGS([w], max_iter=100, tolerance_change=1e-7, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        total = ridge * w.square().sum()
        for x, target, weight in zip(xs, targets, share, strict=True):
            logit = x @ w
            total = total + weight * (logit.logsumexp(0) - (target * logit).sum(0)).sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimiser.step(loss)  # type: ignore[no-untyped-call]
    full = torch.zeros(d)
    full[kept] = w.detach()
    return full


def question_shares(datasets: Sequence[str], sizes: Sequence[int]) -> list[float]:
    """Weight of one question of each dialogue, so that every dataset weighs the same and the weights add up to 1."""
    totals = {name: sum(n for other, n in zip(datasets, sizes, strict=True) if other == name) for name in datasets}
    return [1 / (len(totals) * totals[name]) for name in datasets]
