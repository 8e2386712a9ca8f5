"""The whole of REMIND in a few minutes on two cores, in a world whose answers are known.

The shipped nano backbone reads dialogues in which remarks that begin with a flag word do not count. It has never seen
that rule, so that the plain dialogue (x0) misleads it; markers (x1) and a summary (x2) help. Alignment then teaches it
to answer from x0 alone, without a single label, or with labels of which many are wrong.

What is trained on and measured are states that the world's known answers make. Retrieval, SAEs, grounding and summaries
run as they do on dialogues of one's own; what they make is measured apart.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from remind.alignment.config import DataConfig, Edge, Objective, TrainConfig, TrainerConfig
from remind.core.errors import ConfigError
from remind.core.files import write_json
from remind.data.dialogue import FORMATS, Corpus
from remind.data.readers.refmem import write_refmem
from remind.grounding import GroundingConfig
from remind.perception import PerceptionConfig, RetrieveConfig
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord
from remind.testbed.labels import LabelConfig
from remind.testbed.ladder import LadderConfig, records, write_states
from remind.testbed.world import World, WorldConfig, make_world
from sae.config import SAETrainConfig

#: For each run whether it has labels, the wrong ones among them, and whether it distils.
ARMS: dict[str, tuple[bool, bool]] = {
    "PRA without a label": (False, True),
    "PRA, {noise:.0%} of the labels wrong": (True, True),
    "SFT, {noise:.0%} of the labels wrong": (True, False),
}
COMPARED = "Answers from x0 before and after alignment without a label: percent of {n} test questions"
COMPARED_NOTE = """\
Acc: letters exact, direct answers as the offline judge rules. MemR: this backbone answers and quotes no evidence."""
LADDER = "Accuracy from x0, x1 and x2 by training: share of the same {n} questions, direct answers word for word"
LADDER_NOTE = """\
The dialogues and wordings are ones that no training has seen. SFT: the labels alone, on x0, as many steps. This is one
seed; python -m experiments.proof is the experiment with intervals."""
HELD_OUT = "Held-out loss on {n} {split} questions with their true answers, from metrics.jsonl of each run"
HELD_OUT_NOTE = """\
Loss: the run's own, Eq. 7 for PRA, CE(x0) for SFT. CE(x0): cross-entropy of the true answer under x0, nats a token."""
RETRIEVED = "States from retrieval, SAEs, grounding and summaries: accuracy on {n} test questions"
RETRIEVED_NOTE = """\
Built without knowledge of the world: over {n} questions x0 holds {x0:.2f} of the evidence, the marks {marked:.2f}.
All tables above, and training, are of states made from the evidence that the world knows. SAEs of so small a model and
summaries by rule show the machinery, not the method; the backbone was never trained on states like these."""


@dataclass
class DemoConfig:
    """See what x0, x1 and x2 are worth to a small model, and what alignment makes of it."""

    out: str = "runs/demo"
    """Folder for what the demo writes: world, states, SAEs, runs, exported checkpoints, reports, plot."""
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
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(lr=5e-4, max_steps=150, batch_size=8, eval_every=50)
    )
    """The training loop, of SFT too."""
    sae_layers: tuple[int, ...] = (2, 3)
    """Layers of the backbone that get an SAE."""
    sae: SAETrainConfig = field(
        default_factory=lambda: SAETrainConfig(d_sae=1024, k=16, steps=200, batch_size=512, lr=1e-3)
    )
    """Training of the SAEs, on dialogues that share nothing with the questions."""
    perception: PerceptionConfig = field(
        default_factory=lambda: PerceptionConfig(retrieve=RetrieveConfig(top_share=0.3))
    )
    """Segments, cues, retrieval (Section 4.2)."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Guidance, resonance, selection (Section 4.3)."""
    overwrite: bool = True
    """Replace what an earlier demo left in out."""


def demo(cfg: DemoConfig) -> Path:
    """Read, ground, align, export, evaluate; prints accuracy from x0, x1 and x2 before and after, and held-out losses.

    Returns:
        The exported checkpoint.

    Raises:
        ConfigError: out exists and overwrite is off.
    """
    from remind.evaluation.tables import compare_rows
    from remind.states.parquet import read_manifest, read_states

    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    started = perf_counter()
    cfg.world.seed = cfg.seed

    _heading("A world of dialogues in which remarks that begin with a flag word do not count")
    world = make_world(cfg.world)
    questions = [record for record in records(world, cfg.ladder) if record.split == "test"]
    print(_example(questions))

    _heading("From dialogue to states: sparse autoencoders on the backbone, retrieval, grounding, summaries")
    print("Measured in the last table alone: training and the other tables take states made from the known evidence.")
    _build_states(cfg, world, out)

    _heading("What each state is worth to the backbone as it is")
    rows = {"before": _accuracy("nano", questions)}
    print(table(rows))

    states: dict[bool, Path] = {}
    for labelled in dict.fromkeys(labelled for labelled, _ in ARMS.values()):
        labels = LabelConfig(cfg.noise, None if labelled else 0, seed=cfg.seed)
        folder = out / f"states-{'labelled' if labelled else 'unlabelled'}"
        states[labelled] = write_states(world, folder, cfg.ladder, labels, overwrite=True)
    runs: dict[str, Path] = {}
    exported: dict[str, Path] = {}
    for name, (labelled, distils) in ARMS.items():
        title = name.format(noise=cfg.noise)
        _heading(title)
        runs[title], exported[title] = _align(cfg, states[labelled], distils, out / f"run{len(runs)}")
        rows[title] = _accuracy(exported[title], questions)

    title, best = next(iter(exported.items()))
    _heading("Answers from x0, and from retrieved states, before and after alignment without a label")
    folder = next(iter(states.values()))
    before = _evaluate("nano", folder, out / "evaluation-before")
    after = _evaluate(str(best), folder, out / "evaluation")
    retrieved_questions = read_states(out / "retrieved")
    retrieved = {
        "before": _accuracy("nano", retrieved_questions),
        title: _accuracy(best, retrieved_questions),
    }

    recall = read_manifest(out / "retrieved")["evidence_recall"]["all"]
    note = RETRIEVED_NOTE.format(x0=recall["x0"], marked=recall["marked"], n=recall["n"])
    _show(COMPARED.format(n=before["overall"]["n"]), compare_rows(before, after), COMPARED_NOTE)
    _show(LADDER.format(n=len(questions)), table(rows), LADDER_NOTE)
    _show(*_held_out(runs))
    _show(RETRIEVED.format(n=len(retrieved_questions)), table(retrieved, ("all",)), note)
    write_json(out / "ladder.json", rows)
    write_json(out / "retrieved.json", retrieved)
    print(f"\nplot: {plot(rows, out / 'ladder.png')}")
    print(f"states: {', '.join(map(str, states.values()))}; retrieved: {out / 'retrieved'}")
    print(f"report: {out / 'evaluation' / 'report.html'}; before: {out / 'evaluation-before' / 'report.html'}")
    print(f"exported checkpoint: {best}")
    print(f"took {perf_counter() - started:.0f} s")
    return best


def _build_states(cfg: DemoConfig, world: World, out: Path) -> None:
    """The stages that dialogues of one's own go through; nothing is known of the world."""
    from remind.pipeline import BuildStatesConfig, build_states
    from remind.train_sae import TrainSAEConfig, train_sae

    talk = make_world(WorldConfig(train=12, dev=0, test=0, rule="none", by_template=False, seed=cfg.seed + 90_000))
    write_refmem(talk.corpus, out / "talk.jsonl")
    # of what is retrieved only the test questions are measured
    questions = tuple(question for question in world.corpus.questions if question.split == "test")
    ids = {question.dialogue_id for question in questions}
    dialogues = tuple(dialogue for dialogue in world.dialogues if dialogue.id in ids)
    write_refmem(Corpus(dialogues, questions), out / "world.jsonl")
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


def _align(cfg: DemoConfig, states: Path, distils: bool, out: Path) -> tuple[Path, Path]:
    """The run and the checkpoint exported from it."""
    from remind.alignment.config import ExportConfig
    from remind.alignment.export import export
    from remind.alignment.trainer import train

    # an earlier demo's, which this one replaces; a run is never written over
    shutil.rmtree(out, ignore_errors=True)
    cache = str(out.parent / "training-cache")
    run = train(
        TrainConfig(
            states=str(states),
            model="nano",
            out=str(out),
            seed=cfg.seed,
            objective=cfg.objective if distils else Objective(lambda_hard=1.0, edges=()),
            data=DataConfig(unlabelled="x2" if distils else "skip", max_decoded=12, cache=cache),
            trainer=cfg.trainer,
        )
    )
    return run, export(ExportConfig(run=str(run), out=f"{out}-exported", checkpoint="last", overwrite=True))


def _evaluate(model: str, states: Path, out: Path) -> dict[str, Any]:
    """The report on a model's answers to the test questions from x0."""
    from remind.evaluation.config import EvaluateConfig
    from remind.evaluation.run import evaluate

    return evaluate(EvaluateConfig(states=str(states), model=model, out=str(out), max_new_tokens=12, overwrite=True))


def _held_out(runs: Mapping[str, Path]) -> tuple[str, str, str]:
    """Title, table and note: the held-out losses of each run, at its first and last measurement."""
    from remind.alignment.metrics import read_metrics
    from remind.evaluation.tables import plain

    lines, last = [], {"samples": 0, "split": "held-out"}
    for title, run in runs.items():
        evaluations = [row for row in read_metrics(run) if row["kind"] == "eval"]
        last = evaluations[-1]
        # a run that measures at its end alone has nothing from before training
        first = evaluations[0] if evaluations[0]["step"] == 0 else None
        values = [f"{row[name]:.3f}" if row else "–" for name in ("total", "ce0") for row in (first, last)]
        lines.append([title, *values])
    head = ["", *(f"{name} {when}" for name in ("loss", "CE(x0)") for when in ("before", "after"))]
    return HELD_OUT.format(n=last["samples"], split=last["split"]), plain(head, lines), HELD_OUT_NOTE


Row = Mapping[str, Mapping[str, float]]


def _accuracy(model: str | Path, questions: Sequence[StateRecord]) -> Row:
    """Accuracy by format, and over all, under each level."""
    from remind.models.load import load_backbone
    from remind.testbed.accuracy import correct_answers

    backbone = load_backbone(model)
    row: dict[str, dict[str, float]] = {name: {} for name in (*FORMATS, "all")}
    for level in LEVELS:
        correct = correct_answers(backbone, questions, level)
        for name, accuracies in row.items():
            hits = [hit for hit, record in zip(correct, questions, strict=True) if name in ("all", record.format)]
            accuracies[level] = sum(hits) / max(1, len(hits))
    return row


def table(rows: Mapping[str, Row], names: Sequence[str] = ("direct", "single", "multi", "all")) -> str:
    """Accuracy as lines of text, of the formats in `names`."""
    width = max(len(title) for title in rows)
    heads = "".join(f"{name:^18}" for name in names)
    levels = "".join(f"{level:>6}" for level in LEVELS)
    lines = [f"{'':{width}} {heads}", f"{'':{width}} {levels * len(names)}"]
    for title, row in rows.items():
        cells = "".join(f"{row[name][level]:6.2f}" for name in names for level in LEVELS)
        lines.append(f"{title:{width}} {cells}")
    return "\n".join(lines)


def plot(rows: Mapping[str, Row], path: Path) -> Path:
    """Accuracy under x0, x1, x2 before and after, over all formats."""
    from remind.viewing.plots import LEVEL_COLOURS
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


def _example(questions: Sequence[StateRecord]) -> str:
    """One question as x2 shows it, without the fixed instructions."""
    record = next(r for r in questions if r.format == "single" and not r.visual)
    start, end = record.x1.dialogue
    question = record.x0.text[record.x0.text.rindex("Question:") :]
    summary = record.x2.text[: record.x2.text.rindex("Question:")].strip().splitlines()[-1]
    return f"{record.x1.text[start:end]}\nReflection: {summary}\n{question}Answer: {record.answers[0]}"


def _show(title: str, lines: str, note: str) -> None:
    print(f"\n{title}\n{lines}\n{note}")


def _heading(stage: str) -> None:
    print(f"\n— {stage}", flush=True)
