"""Presets of configs/paper: the values that the paper prints, and what a second file changes."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from remind.alignment.config import Edge, Objective
from remind.build import BuildStatesConfig
from remind.core.cli import parse
from remind.evaluation.config import EvaluateConfig
from remind.grounding import GroundingConfig
from remind.train_pra.config import TrainConfig
from remind.train_sae import TrainSAEConfig

PAPER = Path(__file__).parents[1] / "configs" / "paper"


def preset(config: type, *names: str, required: str) -> Any:
    words = [word for name in names for word in ("--config", str(PAPER / f"{name}.yaml"))]
    return parse(config, "", [*words, *required.split()])


def build(*names: str) -> BuildStatesConfig:
    return preset(BuildStatesConfig, *names, required="--input i --out o")  # type: ignore[no-any-return]


def objective(name: str) -> Objective:
    return preset(TrainConfig, "pra_lora", name, required="--states s --out o").objective  # type: ignore[no-any-return]


def test_recommended_is_what_is_had_without_a_file() -> None:
    assert build("grounding_recommended").grounding == GroundingConfig()
    assert objective("objective_as_printed") == Objective()


def test_a_later_file_changes_what_it_names_and_nothing_else() -> None:
    alone, both = build("build"), build("build", "grounding_as_printed")
    assert alone.grounding == replace(GroundingConfig(), context_codes="joint", images="pixels", image_tokens=64)
    assert both.grounding.context_codes == "joint"
    assert (both.llm, both.perception, both.sae) == (alone.llm, alone.perception, alone.sae)
    assert (both.perception.retrieve.max_context_tokens, both.perception.retrieve.top_share) == (None, 0.2)


def test_all_stages_are_shown_images_alike() -> None:
    stages = [build("build").grounding, preset(EvaluateConfig, "evaluate_base", required="")]
    stages += [preset(TrainConfig, f"pra_{name}", required="").data for name in ("full", "lora", "qlora")]
    assert {(one.images, one.image_tokens) for one in stages} == {("pixels", 64)}
    assert preset(TrainSAEConfig, "sae", required="").image_tokens == 64
    # the trained model says it by itself
    assert preset(EvaluateConfig, "evaluate", required="").images is None


def test_inference_of_the_paper_sees_x0_alone() -> None:
    cfg = build("build")
    assert [cfg.levels_of(split) for split in ("train", "dev", "test")] == [("x0", "x1", "x2")] * 2 + [("x0",)]
    assert (cfg.split.train, cfg.split.dev) == (0.2, 0.0)


def test_what_is_printed() -> None:
    """Section 5.1 and Appendix E.2; what the equations make of such settings is tested with grounding and alignment."""
    printed = {"alpha": 6.0, "beta": 4.0, "lam": 0.3, "window": 1, "budget_tokens": 3200, "layers": "all"}
    open_ = {"beta_unit": None, "anchor_idf": False, "anchor_codes": "strategy", "match": "summed", "agg": "mean"}
    open_ |= {"sigma": 1.0, "fuse": None, "threshold": None, "budget_share": 1.0, "idf": "corpus"}
    found = asdict(build("grounding_as_printed").grounding)
    assert {name: found[name] for name in printed | open_} == printed | open_
    for name, teacher, tau, edges in (
        ("objective_as_printed", "live", 2.0, (Edge(0, 1, 3.0, 0.5), Edge(1, 2, 3.0, 0.5))),
        ("objective_recommended", "base", 1.0, (Edge(0, 1, 3.0, 0.5), Edge(0, 2, 3.0, 0.5))),
    ):
        assert objective(name) == Objective(0.2, tau, edges, teacher_model_kind=teacher)  # type: ignore[arg-type]
