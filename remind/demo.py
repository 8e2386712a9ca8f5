"""The whole of REMIND in a few minutes on two cores, from dialogue files to a better answer, where answers are known.

A small world of dialogues is written as files. From there on the demo does what one does with dialogues of one's own:
SAEs are trained on the backbone, segments are retrieved, turns are marked, an LLM writes summaries, and alignment
teaches the backbone to answer from x0 alone, without a single label. The LLM is a simulated one, the reader of
`remind.testbed.reader`: it gets the same prompts as any other, and knows that remarks which begin with the flag word do
not count. The shipped nano backbone has never seen that rule.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter

from remind.alignment.config import Edge, Objective
from remind.core.errors import ConfigError
from remind.core.files import read_json, write_json, write_text
from remind.core.processes import cores, spawned_pool
from remind.data.dialogue import FORMATS
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord
from remind.testbed.built import BuiltConfig, build_world, train_saes
from remind.testbed.ladder import LabelConfig, labelled, with_labels, write_records
from remind.testbed.world import World, WorldConfig, make_world
from remind.train_pra.config import DataConfig, TrainConfig, TrainerConfig
from sae.ranges import Seed, Share, Workers, check_ranges

PRA = "PRA without a label"
SFT = "SFT, {noise:.0%} of the labels wrong"
COMPARED = "Answers from x0 before and after alignment without a label: percent of {n} test questions"
COMPARED_NOTE = """\
First: before; second: after. Accuracy: letters exact, direct answers as the offline judge rules."""
LADDER = "Accuracy from x0, x1 and x2 by training: share of the same {n} questions, direct answers word for word"
LADDER_NOTE = """\
The dialogues and wordings are ones that no training has seen. x0 holds {x0:.0%} of the evidence, the marks {marked:.0%}
of it in {turns:.0%} of the turns. SFT: labels alone, on x0, as many steps. This is one seed; experiments.proof with
configs/proof_built.yaml is the experiment, with intervals and with other marks."""
Row = Mapping[str, Mapping[str, float]]
HELD_OUT = "Held-out loss on {n} {split} questions with their true answers, from metrics.jsonl of each run"
HELD_OUT_NOTE = """\
Loss: the run's own, Eq. 7 for PRA, CE(x0) for SFT. CE(x0): cross-entropy of the true answer under x0, nats a token."""


@dataclass
class DemoConfig:
    """Run the whole pipeline once on a small world, and show what x0, x1, x2 and alignment do for a small model."""

    out: str = "runs/demo"
    """Folder for what the demo writes: dialogues, SAEs, states, runs, exported checkpoints, reports."""
    seed: Seed = 0
    """The world, and the order of the training examples."""
    world: WorldConfig = field(default_factory=lambda: WorldConfig(train=20, dev=1, test=8))
    """Dialogues, 20 questions each, and how hard they are."""
    built: BuiltConfig = field(default_factory=BuiltConfig)
    """SAEs, retrieval, grounding, and the simulated LLM."""
    noise: Share = 0.4
    """Share of wrong labels in the run that has any."""
    objective: Objective = field(
        default_factory=lambda: Objective(
            lambda_hard=0.05, tau=1.0, edges=(Edge(0, 1), Edge(0, 2)), teacher_model_kind="base"
        )
    )
    """Progressive Reflective Alignment (Eq. 6-7)."""
    trainer: TrainerConfig = field(
        default_factory=lambda: TrainerConfig(learning_rate=5e-4, max_steps=150, batch_size=8, eval_steps=50)
    )
    """The training loop, of SFT too."""
    workers: Workers = 2
    """Processes that build states; with more than one the two runs are trained at the same time."""

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)


def demo(cfg: DemoConfig) -> Path:
    """Read, ground, align, export, evaluate; prints accuracy from x0, x1 and x2 before and after, and held-out losses.

    Returns:
        The exported checkpoint.
    """
    out = Path(cfg.out)
    from remind.evaluation.compare import compare
    from remind.evaluation.compare import table as compared
    from remind.evaluation.config import CompareConfig
    from remind.states.dataset import read_states

    # an earlier demo's, which this one replaces; nothing else that lies there
    parts = ("sae", "states", "cache", "run-pra", "run-sft", "training-cache")
    left = any((out / name).exists() for name in (".demo", "ladder.json"))
    if not left and (others := [name for name in parts if (out / name).exists()]):
        raise ConfigError(f"{out / others[0]} is not a demo's, and would be replaced; choose another out")
    write_text(out / ".demo", "")
    for name in parts:
        shutil.rmtree(out / name, ignore_errors=True)
    started = perf_counter()
    cfg.world.seed = cfg.seed
    world = make_world(cfg.world)

    _heading("Sparse autoencoders on the backbone, from small talk")
    saes = train_saes(cfg.built, "nano", out / "sae")
    _heading("From dialogue files to states: segments, cues, retrieval, grounding, summaries")
    states = build_world(cfg.built, world, "nano", saes, out / "states", out / "cache", cfg.workers)
    records = list(read_states(states))
    questions = [record for record in records if record.split == "test"]
    print(_example(questions))

    sft = SFT.format(noise=cfg.noise)
    unlabelled = _with_targets(LabelConfig(labelled=0), world, records, out / "states-unlabelled")
    labelled = _with_targets(LabelConfig(cfg.noise, seed=cfg.seed), world, records, out / "states-labelled")
    _heading(f"{PRA}; {sft}")
    processes = min(cfg.workers, 2)
    with spawned_pool(processes, _start, (max(1, cores() // processes),)) as pool:
        # SFT, which takes less time, comes after what is measured before
        aligned = pool.submit(_train, cfg, unlabelled, questions, out / "run-pra", states, out / "evaluation")
        before = pool.submit(_measure, "nano", questions, states, out / "evaluation-before")
        tuned = pool.submit(_train, cfg, labelled, questions, out / "run-sft")
        rows = {"before": before.result(), PRA: aligned.result(), sft: tuned.result()}

    _heading("Answers from x0 before and after alignment without a label")
    recall = read_json(states / "manifest.json")["evidence_recall"]["all"]
    note = LADDER_NOTE.format(x0=recall["x0"], marked=recall["marked"], turns=_marked_turns(questions))
    result = compare(CompareConfig(str(out / "evaluation-before"), str(out / "evaluation")))
    _show(COMPARED.format(n=result["n"]), compared(result), COMPARED_NOTE)
    _show(LADDER.format(n=len(questions)), table(rows), note)
    if cfg.world.dev and cfg.trainer.eval_strategy != "no":
        _show(*_held_out({PRA: out / "run-pra", sft: out / "run-sft"}))
    write_json(out / "ladder.json", rows)
    print(f"\ndialogues: {out / 'states.jsonl'}; states: {states}; SAEs: {saes}")
    print(f"report: {out / 'evaluation' / 'report.html'}; before: {out / 'evaluation-before' / 'report.html'}")
    exported = out / "run-pra-exported"
    print(f"exported checkpoint: {exported}")
    print(f"took {perf_counter() - started:.0f} s")
    return exported


def _with_targets(labels: LabelConfig, world: World, records: Sequence[StateRecord], out: Path) -> Path:
    """The states with these labels of training questions, and held-out answers in the form that the backbone writes."""
    return write_records(labelled(records, with_labels(world.questions, labels)), out, {"labels": asdict(labels)})


def _marked_turns(records: Sequence[StateRecord]) -> float:
    """Share of the turns of x0 that stand inside marks."""
    from remind.states.records import blocks_of

    marked = sum(end - start + 1 for record in records for start, end in blocks_of(record.x1))
    return marked / sum(len(record.x0.turns) for record in records)


def _start(threads: int) -> None:
    import torch

    torch.set_num_threads(threads)


def _train(
    cfg: DemoConfig,
    targets: Path,
    questions: Sequence[StateRecord],
    out: Path,
    states: Path | None = None,
    evaluation: Path | None = None,
) -> Row:
    """Train on states with targets and export; SFT where nothing is evaluated. Accuracy of the test questions."""
    from remind.train_pra.config import ExportConfig
    from remind.train_pra.export import export
    from remind.train_pra.run import train

    distils = evaluation is not None
    if not distils:
        # one progress bar would be drawn over the other
        os.environ["REMIND_QUIET"] = "1"
    run = train(
        TrainConfig(
            states=str(targets),
            model="nano",
            out=str(out),
            seed=cfg.seed,
            objective=cfg.objective if distils else Objective(lambda_hard=1.0, edges=()),
            data=DataConfig(
                unlabelled="x2" if distils else "skip", max_decoded=12, cache=str(out.parent / "training-cache")
            ),
            trainer=cfg.trainer,
        )
    )
    exported = export(ExportConfig(run=str(run), out=f"{out}-exported", checkpoint="last", overwrite=True))
    return _measure(str(exported), questions, states, evaluation)


def _measure(model: str, questions: Sequence[StateRecord], states: Path | None, evaluation: Path | None) -> Row:
    """Accuracy by format, and over all, under each level; an evaluation of x0 is written where one is asked for."""
    from remind.evaluation.config import EvaluateConfig
    from remind.evaluation.run import run_evaluation
    from remind.models.backbone import load_backbone
    from remind.testbed.accuracy import correct_answers

    os.environ["REMIND_QUIET"] = "1"
    if evaluation is not None:
        run_evaluation(
            EvaluateConfig(states=str(states), model=model, out=str(evaluation), max_new_tokens=12, overwrite=True)
        )
    backbone = load_backbone(model)
    row: dict[str, dict[str, float]] = {name: {} for name in (*FORMATS, "all")}
    for level in LEVELS:
        correct = correct_answers(backbone, questions, level)
        for name, accuracies in row.items():
            hits = [hit for hit, record in zip(correct, questions, strict=True) if name in ("all", record.format)]
            accuracies[level] = sum(hits) / max(1, len(hits))
    return row


def _held_out(runs: Mapping[str, Path]) -> tuple[str, str, str]:
    """Title, table and note: the held-out losses of each run, at its first and last measurement."""
    from remind.alignment.metrics import read_metrics
    from remind.evaluation.tables import plain

    lines = []
    for title, run in runs.items():
        first, *_, last = [row for row in read_metrics(run) if row["kind"] == "eval"]
        lines.append([title, *(f"{row[name]:.3f}" for name in ("total", "ce0") for row in (first, last))])
    head = ["", *(f"{name} {when}" for name in ("loss", "CE(x0)") for when in ("before", "after"))]
    return HELD_OUT.format(n=last["samples"], split=last["split"]), plain(head, lines), HELD_OUT_NOTE


def table(rows: Mapping[str, Row], names: Sequence[str] = ("direct", "single", "multi", "all")) -> str:
    """Accuracy as lines of text, of the formats in `names`."""
    from remind.evaluation.tables import plain

    levels = [(f"{title}, {level}", row, level) for title, row in rows.items() for level in LEVELS]
    return plain(["", *names], [[head, *(f"{row[name][level]:.2f}" for name in names)] for head, row, level in levels])


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
