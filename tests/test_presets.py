"""Presets of configs/paper: what is printed in the paper, computed by hand, against what the presets make of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.alignment import pra_loss
from remind.alignment.config import Objective, TrainConfig
from remind.alignment.objective import position_terms
from remind.core.cli import parse
from remind.grounding import Grounder, GroundingConfig
from remind.grounding.places import Part
from remind.models.load import load_backbone
from remind.pipeline import BuildStatesConfig
from sae import SparseCodes
from tests.grounding.conftest import saes_for
from tests.grounding.test_ground import state_of

PAPER = Path(__file__).parents[1] / "configs" / "paper"
D_SAE = 96


def preset(config: type, *names: str, required: str) -> Any:
    words = [word for name in names for word in ("--config", str(PAPER / f"{name}.yaml"))]
    return parse(config, "", [*words, *required.split()])


def build(*names: str) -> BuildStatesConfig:
    return preset(BuildStatesConfig, *names, required="--input i --out o")  # type: ignore[no-any-return]


def objective(name: str) -> Objective:
    return preset(TrainConfig, "pra_lora", name, required="--states s --out o").objective  # type: ignore[no-any-return]


def rows(codes: SparseCodes) -> list[dict[int, float]]:
    """F_t with h̃_t of each token, in plain numbers."""
    pairs = zip(codes.values.tolist(), codes.indices.tolist(), strict=True)
    return [{j: h for h, j in zip(*pair, strict=True) if h > 0} for pair in pairs]


def test_recommended_is_what_is_had_without_a_file() -> None:
    assert build("grounding_recommended").grounding == GroundingConfig()
    assert objective("objective_as_printed") == Objective()


def test_a_later_file_changes_what_it_names_and_nothing_else() -> None:
    alone, both = build("build"), build("build", "grounding_as_printed")
    assert alone.grounding == replace(GroundingConfig(), context_codes="joint")
    assert both.grounding.context_codes == "joint"
    assert (both.llm, both.perception, both.sae) == (alone.llm, alone.perception, alone.sae)
    assert (both.perception.retrieve.max_context_tokens, both.perception.retrieve.top_share) == (None, 0.2)


def test_grounding_as_printed_is_equations_3_to_5() -> None:
    """α 6, β 4, λ .3, the mean, w 1 written out here once more; on a smaller budget, since the dialogue is short."""
    config = replace(build("build", "grounding_as_printed").grounding, budget_tokens=45)
    backbone = load_backbone("nano")
    idf = {2: torch.rand(D_SAE, generator=torch.Generator().manual_seed(0)) * 3}
    state = state_of()
    trace = Grounder(backbone, saes_for(backbone, (2,)), idf, config).trace(state)
    codes, own = trace.codes, trace.codes.layers[2]
    reason, anchors, tokens = rows(own.reasoning), rows(own.anchors), rows(own.dialogue)
    # Eq. 3
    weights = [float(w) for w in idf[2].double()]
    v = [max(weights[j] * sum(j in f for f in reason), 6.0 * sum(j in f for f in anchors)) for j in range(D_SAE)]
    assert any(v)
    # Eq. 4; a reply counts for the turn before it unless a gap lies between them
    turn, part, run = codes.turn.tolist(), codes.part.tolist(), state.runs
    b = []
    for k in range(len(run)):
        marker = {j for t, f in enumerate(tokens) if turn[t] == k and part[t] == Part.SPEAKER for j in f}
        b.append(sum(v[j] for j in marker))
    r = []
    for t, f in enumerate(tokens):
        k = turn[t]
        reply = b[k + 1] if k + 1 < len(run) and run[k + 1] == run[k] else 0.0
        r.append(sum(v[j] * h for j, h in f.items()) + 4.0 * (b[k] + reply))
    assert trace.resonance[2].tolist() == pytest.approx(r, rel=1e-4)
    # s = r * K, the standard Gaussian to three widths
    kernel = {d: math.exp(-(d**2) / 2) for d in range(-3, 4)}
    total = sum(kernel.values())
    s = [
        sum(r[t + d] * w / total for d, w in kernel.items() if 0 <= t + d < len(r) and run[turn[t + d]] == run[turn[t]])
        for t in range(len(r))
    ]
    # Eq. 5
    salience = []
    for k in range(len(run)):
        kinds = [
            [s[t] for t in range(len(s)) if turn[t] == k and part[t] == kind] for kind in (Part.TEXT, Part.CAPTION)
        ]
        text, caption = (sum(kind) / len(kind) if kind else None for kind in kinds)
        if text is not None and caption is not None:
            salience.append(0.7 * text + 0.3 * caption)
        else:
            salience.append(text if text is not None else caption if caption is not None else -math.inf)
    assert list(trace.state.salience) == pytest.approx(salience, rel=1e-4)
    # the most salient turns, each with its neighbours of the run, until the next would pass the budget
    sizes, marked = codes.turn_tokens.tolist(), set[int]()
    for k in sorted(range(len(run)), key=lambda k: -salience[k]):
        wider = marked | {n for n in (k - 1, k, k + 1) if 0 <= n < len(run) and run[n] == run[k]}
        if sum(sizes[n] for n in wider) > 45:
            break
        marked = wider
    assert 0 < len(marked) < len(run)
    assert {n for first, last in trace.state.blocks for n in range(first, last + 1)} == marked


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def softmax(z: list[float], tau: float) -> list[float]:
    exp = [math.exp(value / tau) for value in z]
    return [value / sum(exp) for value in exp]


@pytest.mark.parametrize(
    ("name", "tau", "edges"),
    [("objective_as_printed", 2.0, [(0, 1), (1, 2)]), ("objective_recommended", 1.0, [(0, 1), (0, 2)])],
)
def test_objectives_are_equations_6_and_7(name: str, tau: float, edges: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = [3 * torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(3)]
    targets = torch.tensor([0, 3, 6, 2, 2])
    hard = sum(-math.log(softmax(z.tolist(), 1.0)[y]) for z, y in zip(logits[0], targets.tolist(), strict=True)) / 5
    soft = 0.0
    for student, teacher in edges:
        for at in range(5):
            p, q = softmax(logits[student][at].tolist(), tau), softmax(logits[teacher][at].tolist(), tau)
            soft += 3.0 * (0.5 * kl(q, p) + 0.5 * kl(p, q)) / 5
    wanted = 0.2 * hard + 0.8 * tau**2 * soft
    settings = objective(name)
    total, _ = position_terms(dict(enumerate(logits)), targets, settings)
    assert float(total.mean()) == pytest.approx(wanted, rel=1e-10)
    assert settings.teacher_weights == ("live" if name == "objective_as_printed" else "base")
    if name == "objective_as_printed":
        assert float(pra_loss(*logits, targets).total) == pytest.approx(wanted, rel=1e-10)
