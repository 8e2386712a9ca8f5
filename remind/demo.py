"""The whole of REMIND in a few minutes on two cores: dialogue, states, alignment, export, evaluation."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from time import perf_counter

from remind.alignment.config import TrainConfig, TrainerConfig
from remind.alignment.losses import Objective
from remind.alignment.trainer import read_metrics, train
from remind.errors import ConfigError
from remind.evaluation.harness import EvaluateConfig, evaluate
from remind.evaluation.report import compare_rows
from remind.export import ExportConfig, export
from remind.grounding import GroundingConfig
from remind.perception import PerceptionConfig
from remind.pipeline import BuildStatesConfig, build_states
from remind.sae_training import TrainSAEConfig, train_sae
from remind.testbed.nano import save_nano
from remind.testbed.sample import sample_path
from sae.trainer import SAETrainConfig

NOTE = """\
The backbone of this demo is a Qwen3-VL of {millions:.1f} million random parameters. The table shows that the machinery
works from end to end; it says nothing about how well the method works."""


@dataclass
class DemoConfig:
    """Run everything once on the bundled sample; the stages have the settings of their own scripts."""

    out: str = "runs/demo"
    """Folder for what the demo writes: backbone, SAEs, states, run, exported checkpoint, reports."""
    seed: int = 0
    """Weights of the backbone, order of the training examples."""
    sae_layers: tuple[int, ...] = (2, 3)
    """Layers of the backbone that get an SAE."""
    sae: SAETrainConfig = field(default_factory=SAETrainConfig)
    """Training of the SAEs, on small talk that shares no line with the sample."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments, cues, retrieval (Section 4.2)."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Guidance, resonance, selection (Section 4.3)."""
    objective: Objective = field(default_factory=Objective)
    """Progressive Reflective Alignment (Eq. 6-7)."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """The training loop."""
    max_new_tokens: int = 96
    """Room for each answer of the evaluation."""
    overwrite: bool = True
    """Replace what an earlier demo left in out."""


def demo(cfg: DemoConfig) -> Path:
    """Build, train, export and evaluate; prints one table of x0 before and after.

    Returns:
        The exported checkpoint.

    Raises:
        ConfigError: out exists and overwrite is off.
    """
    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    started = perf_counter()

    _say("A nano Qwen3-VL")
    backbone = save_nano(out / "backbone", seed=cfg.seed)

    _say("Sparse autoencoders on its hidden states")
    sae = train_sae(
        TrainSAEConfig(
            out=str(out / "sae"), backbone=str(backbone), layers=list(cfg.sae_layers), trainer=cfg.sae, overwrite=True
        )
    )

    _say("States x0, x1, x2 of the bundled questions")
    states = build_states(
        BuildStatesConfig(
            input=str(sample_path()),
            out=str(out / "states"),
            backbone=str(backbone),
            sae=str(sae),
            perception=cfg.perception,
            grounding=cfg.grounding,
            cache=str(out / "cache"),
            overwrite=True,
        )
    )

    _say("Answers from x0 before training")
    before = evaluate(_evaluation(cfg, states, backbone, out / "before"))

    _say("Progressive Reflective Alignment")
    run = train(
        TrainConfig(
            states=str(states),
            model=str(backbone),
            out=str(out / "run"),
            seed=cfg.seed,
            objective=cfg.objective,
            trainer=cfg.trainer,
        )
    )
    exported = export(ExportConfig(run=str(run), out=str(out / "export"), overwrite=True))

    _say("Answers from x0 after training")
    after = evaluate(_evaluation(cfg, states, exported, out / "after"))

    losses = [row for row in read_metrics(run) if row["kind"] == "eval"]
    print(f"\nheld-out loss under x0: {losses[0]['ce0']:.3f} before training, {losses[-1]['ce0']:.3f} after")
    print(compare_rows(before, after))
    print(NOTE.format(millions=_parameters(backbone) / 1e6))
    print(f"report: {out / 'after' / 'report.html'}")
    print(f"exported checkpoint: {exported}")
    print(f"took {perf_counter() - started:.0f} s")
    return exported


def _evaluation(cfg: DemoConfig, states: Path, model: Path, out: Path) -> EvaluateConfig:
    return EvaluateConfig(
        states=str(states), model=str(model), out=str(out), max_new_tokens=cfg.max_new_tokens, overwrite=True
    )


def _parameters(folder: Path) -> int:
    """Numbers in the weight files."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as weights:
            total += sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    return total


def _say(stage: str) -> None:
    print(f"\n— {stage}", flush=True)
