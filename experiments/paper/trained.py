"""Figure 4 (a-c) with training: a model for every row, taught by what the row holds, that answers from its x0.

A row without strategy has none in any level, in training and in the answers. A row without markers has no x1 to learn
from, one without summary no x2; one without both is trained with the hard loss alone.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from experiments.chain.variants import with_variant
from experiments.paper.ablation import STAGES, Change, corpus_of, differences, steps_table, variant
from experiments.paper.cells import bars, product, side_by_side
from experiments.paper.config import PaperConfig
from experiments.paper.items import Result
from experiments.paper.settings import SMALL_MODEL, Setting, ask, by_seed, pooled, settings, sources
from remind.alignment.config import Edge, Objective
from remind.core.cli import parse
from remind.core.errors import ConfigError, ModelError
from remind.core.files import read_json, write_json, write_text
from remind.core.run_folder import as_dict
from remind.data.dialogue import Corpus
from remind.evaluation.compare import Rows, Run, load_run
from remind.evaluation.run import Models, states_hash
from remind.evaluation.team import Team
from remind.states.dataset import read_manifest, read_states
from remind.states.pyramid import ReflectiveState, render
from remind.states.records import StateRecord, attentional_of, summary_of
from remind.testbed.ladder import LabelConfig, labelled, with_labels, write_records
from remind.testbed.world import World, make_world
from remind.train_pra.config import DataConfig, ExportConfig, TrainConfig, TrainerConfig
from remind.train_pra.export import export
from remind.train_pra.run import train

UNTRAINED, ALTERED = "untrained, x0", "altered order"
ROWS = (UNTRAINED, *STAGES, ALTERED)
#: Dialogues that the small form trains on, and the share of its labels that are wrong: with right ones the hard loss
#: alone would be as good as any teacher.
_DIALOGUES, _NOISE = 4, 0.4


def objective_of(objective: Objective, markers: bool, summary: bool) -> Objective:
    """What is left of the objective without x1, without x2, or without both.

    Raises:
        ConfigError: no edge is left.
    """
    if markers and summary:
        return objective
    if not markers and not summary:
        return replace(objective, lambda_hard=1.0, edges=(), teacher_model_kind="live", target_grad="detach")
    if summary:
        # x1 is x0 there
        edges = [replace(edge, student=0) for edge in objective.edges if edge.teacher == 2][:1]
    else:
        edges = [edge for edge in objective.edges if 2 not in (edge.student, edge.teacher)]
    if not edges:
        raise ConfigError(f"the objective has no edge left without {'x1' if summary else 'x2'}; leave that row out")
    return replace(objective, edges=tuple(edges))


def fig4_trained(cfg: PaperConfig) -> Result:
    """See the module. Raises as training, export and evaluation do."""
    if unknown := [name for name in cfg.rows if name not in ROWS]:
        raise ConfigError(f"no row {unknown[0]!r}; there are {', '.join(ROWS)}")
    if cfg.small:
        cfg = replace(cfg, world=replace(cfg.world, train=cfg.world.train or _DIALOGUES))
    order = [name for name in ROWS if not cfg.rows or name in cfg.rows]
    found: dict[str, list[tuple[Setting, Rows]]] = {}
    for setting in settings(cfg, trains=True):
        folder = Path(str(cfg.out)) / f"seed-{setting.seed}"
        corpus_of(setting)
        if setting.evaluate.answers == "server":
            raise ConfigError("the models that fig4_trained makes answer here: set answers local or vllm")
        if cfg.small:
            setting = _with_labels(setting, make_world(replace(cfg.world, seed=setting.seed)), folder / "states")
        for name in order:
            found.setdefault(name, []).append((setting, _row(cfg, setting, name, folder).rows))
    rows = {name: pooled(found[name]) for name in order}
    products = {name: product(own, cfg.resamples) for name, own in rows.items()}
    steps = {name: differences(rows, name, cfg.resamples) for name in order}
    text = f"{side_by_side(products, 'Taught by')}\n{steps_table(steps)}"
    data = {"rows": products, "differences": steps, "by_seed": by_seed(found)}
    shown: list[str] = [format for format in ("multi", "single", "direct", "all") if format in products[order[0]]]
    panels = {f: {name: products[name][f]["all"]["accuracy"] for name in order} for f in shown}
    return Result(data, text, bars(panels, "Accuracy from x0 in percent, by what the model was taught by"))


def _row(cfg: PaperConfig, setting: Setting, name: str, folder: Path) -> Run:
    """The answers of a row's model from the x0 it was trained on."""
    strategy, markers, summary = STAGES.get(name, (True, True, True))
    slug = re.sub(r"\W+", "-", name).strip("-")
    states = Path(setting.evaluate.states)
    if name == ALTERED:
        states = variant(setting, folder / f"states-{slug}", change=_altered(setting))
    elif not strategy or (summary and not markers):
        # a row without summary has no use for x2, whatever stands there
        kept = "-".join(["states", *["no-strategy"] * (not strategy), *["no-markers"] * (not markers)])
        states = variant(setting, folder / kept, strategy, markers)
    start = _start(cfg, setting, folder)
    model = start.model
    if name != UNTRAINED:
        row = replace(start, states=str(states), objective=objective_of(start.objective, markers, summary))
        if not row.objective.edges:
            # a decoded answer has no hard loss
            row = replace(row, data=replace(row.data, targets="gold", unlabelled="skip"))
        model = str(_model(cfg, row, folder, slug))
    asked = replace(setting.evaluate, model=model, states=str(states), level="x0", conditions=[])
    own = replace(setting, evaluate=asked)
    if cfg.small:
        return ask(own, folder / f"answers-{slug}", ["x0"])["x0"]
    _command("evaluate", replace(asked, out=str(folder / f"answers-{slug}")), folder, slug)
    return load_run(folder / f"answers-{slug}")


def _start(cfg: PaperConfig, setting: Setting, folder: Path) -> TrainConfig:
    """How a row with everything is trained; states and out are filled in for each row."""
    if cfg.small:
        objective = Objective(lambda_hard=0.05, tau=1.0, edges=(Edge(0, 1), Edge(0, 2)), teacher_model_kind="base")
        trainer = TrainerConfig(learning_rate=5e-4, max_steps=cfg.steps, batch_size=8)
        data = DataConfig(unlabelled="skip", cache=str(folder / "cache"))
        return TrainConfig("", "", SMALL_MODEL, objective=objective, data=data, trainer=trainer, seed=setting.seed)
    files = [word for path in cfg.train for word in ("--config", path)]
    given: TrainConfig = parse(TrainConfig, "config of TrainConfig", [*files, "--states", "", "--out", ""])
    return replace(given, seed=setting.seed)


def _model(cfg: PaperConfig, row: TrainConfig, folder: Path, slug: str) -> Path:
    """The exported model of a row; trained, from where an earlier start was stopped, if it is not there yet.

    Raises:
        ConfigError: what is there was trained with other settings.
    """
    out, run = folder / f"model-{slug}", folder / f"run-{slug}"
    row = replace(row, out=str(run), resume=True)
    about = {"states": states_hash(row.states), "config": as_dict(row)}
    if out.exists():
        if read_json(folder / f"model-{slug}.json") != about:
            raise ConfigError(f"{out} was trained with other settings or states; choose another out, or remove it")
        return out
    exported = ExportConfig(run=str(run), out=str(out), overwrite=True)
    write_json(folder / f"model-{slug}.json", about)
    if cfg.small:
        train(row)
        return export(exported)
    _command("train-pra", row, folder, slug, cfg.launcher)
    _command("export", exported, folder, slug)
    return out


def _command(name: str, config: Any, folder: Path, slug: str, launcher: str | None = None) -> None:
    """Run a command of `remind` in a process of its own, so that the accelerator's memory is free after it."""
    path = folder / f"{name}-{slug}.yaml"
    write_text(path, yaml.safe_dump(as_dict(config), sort_keys=False))
    front = ["-m", "remind"]
    if launcher is not None:
        front = ["-m", "accelerate.commands.accelerate_cli", "launch", "--config_file", launcher, "--module", "remind"]
    status = subprocess.run([sys.executable, *front, name, "--config", str(path)], check=False).returncode
    if status:
        raise ModelError(f"remind {name} --config {path} ended with status {status}; see above")


def _altered(setting: Setting) -> Change:
    """x1 is x0 with a summary of x0; x2 has the markers beside it: the two stages in the other order."""

    def altered(records: Sequence[StateRecord], corpus: Corpus, *_: bool) -> list[StateRecord]:
        known = {r.question_id: (dialogue, question) for r, dialogue, question in sources(records, corpus)}
        llm = setting.llm or Models(setting.evaluate, Team()).summariser()
        changed = []
        for record, first in zip(records, with_variant("none", records, known, llm), strict=True):
            state = ReflectiveState(attentional_of(record, *known[record.question_id]), summary_of(first))
            changed.append(replace(record, x1=first.x2, x2=render(state)))
        return changed

    return altered


def _with_labels(setting: Setting, world: World, out: Path) -> Setting:
    """The setting on states whose training questions have labels, some of them wrong."""
    questions = with_labels(world.questions, LabelConfig(_NOISE, seed=setting.seed))
    states = setting.evaluate.states
    about = {"noise": _NOISE, "inputs": read_manifest(states)["inputs"]}
    write_records(labelled(list(read_states(states)), questions), out, about)
    return replace(setting, evaluate=replace(setting.evaluate, states=str(out)))
