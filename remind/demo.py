"""The whole of REMIND in a few minutes on two cores, in a world whose answers are known.

The shipped nano backbone reads dialogues in which remarks that begin with a flag word do not count. It has never seen
that rule, so that the plain dialogue (x0) misleads it; markers (x1) and a summary (x2) help. Alignment then teaches it
to answer from x0 alone, without a single label, or with labels of which many are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from remind.alignment.config import DataConfig, TrainConfig, TrainerConfig
from remind.alignment.objective import Edge, Objective
from remind.alignment.trainer import train
from remind.backbone import Backbone, load_backbone
from remind.dialogue import FORMATS
from remind.errors import ConfigError
from remind.evaluation.harness import EvaluateConfig, evaluate
from remind.export import ExportConfig, export
from remind.grounding import GroundingConfig
from remind.io import write_json
from remind.perception import PerceptionConfig
from remind.pipeline import BuildStatesConfig, build_states
from remind.pyramid import LEVELS
from remind.readers.refmem import write_refmem
from remind.sae_training import TrainSAEConfig, train_sae
from remind.states import StateRecord
from remind.testbed.labels import LabelConfig
from remind.testbed.ladder import LadderConfig, records, write_states
from remind.testbed.score import answered
from remind.testbed.world import World, WorldConfig, make_world
from sae.trainer import SAETrainConfig

#: Whether each run is told labels, the wrong ones among them, and whether it distils.
ARMS: dict[str, tuple[bool, bool]] = {
    "PRA without a label": (False, True),
    "PRA, {noise:.0%} of the labels wrong": (True, True),
    "SFT, {noise:.0%} of the labels wrong": (True, False),
}
NOTE = """\
Every cell: share of {n} questions answered rightly, in dialogues and wordings that no training has seen. SFT: the
labels alone, on x0, as many steps. This is one seed; scripts/prove_pra.py is the experiment with intervals."""


@dataclass
class DemoConfig:
    """See what x0, x1 and x2 are worth to a small model, and what alignment makes of it."""

    out: str = "runs/demo"
    """Folder for what the demo writes: world, states, SAEs, runs, exported checkpoint, report, plot."""
    seed: int = 0
    """The world, and the order of the training examples."""
    world: WorldConfig = field(default_factory=lambda: WorldConfig(train=30, dev=1, test=12))
    """Dialogues, 20 questions each, and how hard they are."""
    ladder: LadderConfig = field(default_factory=LadderConfig)
    """What x0, x1 and x2 show."""
    noise: float = 0.4
    """Share of wrong labels in the runs that have any."""
    objective: Objective = field(
        default_factory=lambda: Objective(
            lambda_hard=0.05, tau=1.0, edges=(Edge(0, 1), Edge(0, 2)), teacher_weights="base"
        )
    )
    """Progressive Reflective Alignment (Eq. 6-7)."""
    trainer: TrainerConfig = field(default_factory=lambda: TrainerConfig(lr=5e-4, max_steps=150, batch_size=8))
    """The training loop, of SFT too."""
    sae_layers: tuple[int, ...] = (2, 3)
    """Layers of the backbone that get an SAE."""
    sae: SAETrainConfig = field(default_factory=SAETrainConfig)
    """Training of the SAEs, on dialogues that share nothing with the questions."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments, cues, retrieval (Section 4.2)."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Guidance, resonance, selection (Section 4.3)."""
    overwrite: bool = True
    """Replace what an earlier demo left in out."""


def demo(cfg: DemoConfig) -> Path:
    """Read, ground, align, export, evaluate; prints accuracy by level before and after.

    Returns:
        The exported checkpoint.

    Raises:
        ConfigError: out exists and overwrite is off.
    """
    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    started = perf_counter()
    cfg.world.seed = cfg.seed

    _say("A world of dialogues in which remarks that begin with a flag word do not count")
    world = make_world(cfg.world)
    asked = [record for record in records(world, cfg.ladder) if record.split == "test"]
    print(_example(asked))

    _say("From dialogue to states: sparse autoencoders on the backbone, retrieval, grounding, summaries")
    _pipeline(cfg, world, out)

    _say("What each state is worth to the backbone as it is")
    backbone = load_backbone("nano")
    rows = {"before": _ladder(backbone, asked)}
    print(table(rows))

    exported: dict[str, Path] = {}
    for name, (labelled, distils) in ARMS.items():
        title = name.format(noise=cfg.noise)
        _say(title)
        exported[title] = _align(cfg, world, labelled, distils, out / f"run{len(exported)}")
        rows[title] = _ladder(load_backbone(exported[title]), asked)

    _say("Answers from x0 after alignment without a label")
    best = next(iter(exported.values()))
    evaluate(
        EvaluateConfig(
            states=str(out / "states"), model=str(best), out=str(out / "evaluation"), max_new_tokens=12, overwrite=True
        )
    )

    print(f"\n{table(rows)}\n{NOTE.format(n=len(asked))}")
    write_json(out / "ladder.json", rows)
    print(f"plot: {plot(rows, out / 'ladder.png')}")
    print(f"report: {out / 'evaluation' / 'report.html'}")
    print(f"exported checkpoint: {best}")
    print(f"took {perf_counter() - started:.0f} s")
    return best


def _pipeline(cfg: DemoConfig, world: World, out: Path) -> None:
    """What a user does with dialogues of their own: the true stages, nothing known of the world."""
    talk = make_world(WorldConfig(train=12, dev=0, test=0, rule="none", by_template=False, seed=cfg.seed + 90_000))
    write_refmem(talk.corpus, out / "talk.jsonl")
    write_refmem(world.corpus, out / "world.jsonl")
    sae = train_sae(
        TrainSAEConfig(
            out=str(out / "sae"),
            backbone="nano",
            layers=list(cfg.sae_layers),
            data=str(out / "talk.jsonl"),
            trainer=cfg.sae,
            overwrite=True,
        )
    )
    build_states(
        BuildStatesConfig(
            input=str(out / "world.jsonl"),
            out=str(out / "retrieved"),
            backbone="nano",
            sae=str(sae),
            perception=cfg.perception,
            grounding=cfg.grounding,
            cache=str(out / "cache"),
            limit=4,
            overwrite=True,
        )
    )


def _align(cfg: DemoConfig, world: World, labelled: bool, distils: bool, out: Path) -> Path:
    told = LabelConfig(cfg.noise, None if labelled else 0, seed=cfg.seed)
    states = write_states(world, out.parent / "states", cfg.ladder, told, overwrite=True)
    run = train(
        TrainConfig(
            states=str(states),
            model="nano",
            out=str(out),
            seed=cfg.seed,
            objective=cfg.objective if distils else Objective(lambda_hard=1.0, edges=()),
            data=DataConfig(unlabelled="x2" if distils else "skip", max_decoded=12),
            trainer=cfg.trainer,
        )
    )
    return export(ExportConfig(run=str(run), out=f"{out}-exported", checkpoint="last", overwrite=True))


Row = Mapping[str, Mapping[str, float]]


def _ladder(backbone: Backbone, asked: Sequence[StateRecord]) -> Row:
    """Accuracy by format, and over all, under each level."""
    row: dict[str, dict[str, float]] = {name: {} for name in (*FORMATS, "all")}
    for level in LEVELS:
        right = answered(backbone, asked, level)
        for name, accuracies in row.items():
            some = [ok for ok, record in zip(right, asked, strict=True) if name in ("all", record.format)]
            accuracies[level] = sum(some) / max(1, len(some))
    return row


def table(rows: Mapping[str, Row]) -> str:
    """Accuracy as lines of text."""
    width = max(len(title) for title in rows)
    names = ("direct", "single", "multi", "all")
    heads = "".join(f"{name:^18}" for name in names)
    levels = "".join(f"{level:>6}" for level in LEVELS)
    lines = [f"{'':{width}} {heads}", f"{'':{width}} {levels * len(names)}"]
    for title, row in rows.items():
        cells = "".join(f"{row[name][level]:6.2f}" for name in names for level in LEVELS)
        lines.append(f"{title:{width}} {cells}")
    return "\n".join(lines)


def plot(rows: Mapping[str, Row], path: Path) -> Path:
    """Accuracy under x0, x1, x2 before and after, over all formats."""
    from remind.plots.style import LEVEL_COLOURS
    from sae.figures import Picture, new_figure

    figure = new_figure(7.5, 1.2 + 0.6 * len(rows))
    axes = figure.subplots()
    for place, row in enumerate(rows.values()):
        for number, level in enumerate(LEVELS):
            value = row["all"][level]
            axes.barh(place + (number - 1) * 0.26, value, 0.24, color=LEVEL_COLOURS[level], label=level)
            axes.text(value + 0.01, place + (number - 1) * 0.26, f"{value:.2f}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.set_xlim(0, 1.08)
    axes.set_xlabel("test questions answered rightly")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[: len(LEVELS)], labels[: len(LEVELS)], loc="outside lower right", ncols=3, frameon=False)
    return Picture(figure).save(path)


def _example(asked: Sequence[StateRecord]) -> str:
    """One question as x2 shows it, without the fixed instructions."""
    record = next(r for r in asked if r.format == "single" and not r.visual)
    start, end = record.x1.dialogue
    question = record.x0.text[record.x0.text.rindex("Question:") :]
    summary = record.x2.text[: record.x2.text.rindex("Question:")].strip().splitlines()[-1]
    return f"{record.x1.text[start:end]}\nReflection: {summary}\n{question}Answer: {record.answers[0]}"


def _say(stage: str) -> None:
    print(f"\n— {stage}", flush=True)
