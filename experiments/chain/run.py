"""From dialogue files to the answers of every arm; what is there is not made again."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from experiments.chain.chooser import Chooser
from experiments.chain.config import ARMS, FREE, PROBED, PROBES, Arm, ChainConfig
from experiments.chain.report import outcome, report
from experiments.chain.variants import with_variant, with_x0
from remind.alignment.callbacks import Probe
from remind.alignment.config import Objective
from remind.alignment.metrics import checkpoints
from remind.build import build
from remind.build.plan import paths_of
from remind.core.errors import ConfigError
from remind.core.files import write_rows
from remind.core.progress import track
from remind.core.run_folder import RunFolder, as_dict, flatten
from remind.data.readers import read
from remind.evaluation import likelihood
from remind.evaluation.answerers import LocalAnswers
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.predictions import PREDICTIONS, read_rows
from remind.evaluation.run import run_evaluation
from remind.models.backbone import Backbone, load_backbone
from remind.models.encoder import SentenceEncoder
from remind.models.generate import generate
from remind.perception.auxiliary import AuxiliaryLLM, open_llm
from remind.states.dataset import read_manifest, read_states
from remind.states.records import LEVELS, StateRecord
from remind.testbed.ladder import write_records
from remind.train_pra.config import DataConfig, ExportConfig, TrainConfig
from remind.train_pra.export import export
from remind.train_pra.run import train

#: Settings of the build that change how it is made, not what.
_BUILD_FREE = ("workers", "cache", "device", "out", "overwrite", "shard")


class Fold(NamedTuple):
    """Ids of dialogues by their part; labelled and pool are equal where PRA learns from the questions of SFT."""

    test: list[str]
    dev: list[str]
    labelled: list[str]
    pool: list[str]


def make_folds(inputs: Mapping[str, Sequence[str]], cfg: ChainConfig) -> list[Fold]:
    """Deal the dialogues of every input by themselves, so that each part has its share of each dataset.

    The order depends on the ids and `fold_seed` alone.

    Args:
        inputs: ids of the dialogues with questions, by input.

    Raises:
        ConfigError: too few dialogues for as many folds, dev dialogues and the two parts of training.
    """
    folds = [Fold([], [], [], []) for _ in range(cfg.folds)]
    for source, ids in inputs.items():
        order = sorted(ids, key=lambda name: hashlib.sha256(f"{cfg.fold_seed}:{name}".encode()).hexdigest())
        for number, fold in enumerate(folds):
            test = order[number :: cfg.folds]
            # dev and training differ from fold to fold, too
            rest = [name for name in order[number:] + order[:number] if name not in test]
            train = rest[cfg.dev_dialogues :]
            spare = int(cfg.pool == "others")
            if not test or len(train) < 1 + spare:
                raise ConfigError(
                    f"{source}: {len(ids)} dialogues are too few for {cfg.folds} folds as they are divided"
                )
            labelled = min(max(1, round(cfg.labelled * len(train))), len(train) - spare)
            fold.test.extend(test)
            fold.dev.extend(rest[: cfg.dev_dialogues])
            fold.labelled.extend(train[:labelled])
            fold.pool.extend(train[labelled:] if spare else train[:labelled])
    return folds


def choose(
    records: Sequence[StateRecord], dialogues: Sequence[str], most: int | None, categories: Sequence[str] | None
) -> list[StateRecord]:
    """At most so many questions of each dialogue, evenly apart: those with a gold answer and of these categories."""
    chosen = []
    for name in dialogues:
        own = [r for r in records if r.dialogue_id == name and r.target is not None and r.answers]
        own = [r for r in own if categories is None or r.category is None or r.category in categories]
        count = len(own) if most is None else min(most, len(own))
        chosen += [own[place * len(own) // count] for place in range(count)]
    return chosen


class Asked(NamedTuple):
    """What a model answers test questions from: a level of a variant."""

    variant: str = "built"
    level: str = "x0"

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.level}"


def chain(cfg: ChainConfig) -> Path:
    """Do the stages asked for; prints where the results are.

    Returns:
        The folder of the results.

    Raises:
        ConfigError: settings that cannot be run, or other ones than those the folder was begun with.
        RemindError: of the first run that failed; what was done stays.
    """
    out = Path(cfg.out)
    if cfg.stage != "report":
        with RunFolder(out).held():
            values = flatten(as_dict(cfg))
            free = {f"build.{name}" for name in _BUILD_FREE}
            free |= {name for name in values if name.split(".")[0] in FREE}
            RunFolder(out).claim(values, resume=True, free=free)
            Chain(cfg).run()
    if cfg.stage != "run":
        print(f"results are in {', '.join(str(path) for path in report(cfg))}")
    return out


def log_probabilities(backbone: Backbone, questions: Sequence[Sequence[tuple[StateRecord, str]]]) -> list[list[float]]:
    """Mean log-probability of the gold answer's tokens under each state of each question, in nats.

    Answers of a small model are few words that are right or wrong; this says how near it was.
    """
    asked = track(questions, "score gold answers", len(questions))
    return [likelihood.log_probabilities(backbone, states) for states in asked]


class Chain:
    """The runs of a configuration: a folder for every fold, seed and arm, with its training, model and answers."""

    def __init__(self, cfg: ChainConfig) -> None:
        self.cfg, self.out = cfg, Path(cfg.out)
        self._corpora = {path: read(path, cfg.build.format) for path in paths_of(cfg.build.input)}
        self._sources = {q.id: (c.dialogue(q.dialogue_id), q) for c in self._corpora.values() for q in c.questions}

    def run(self) -> None:
        """All that is not there yet, fold by fold and arm by arm."""
        usable = {record.dialogue_id for record in self.records if record.target is not None}
        dialogues = {path: [d.id for d in corpus.dialogues if d.id in usable] for path, corpus in self._corpora.items()}
        for number, fold in enumerate(make_folds(dialogues, self.cfg)):
            if self.cfg.only_folds is None or number in self.cfg.only_folds:
                for seed in self.cfg.seeds:
                    one = FoldRuns(self, fold, number, seed)
                    for name in self.cfg.plan:
                        one.perform(name)

    @cached_property
    def records(self) -> list[StateRecord]:
        """All states."""
        build(replace(self.cfg.build, out=str(self.out / "states"), overwrite=False))
        records, cfg = read_states(self.out / "states"), self.cfg
        if cfg.x0 == "retrieved":
            return records
        return with_x0(cfg.x0, cfg.x0_turns, records, self._sources, cfg.fold_seed)

    def chosen(self, dialogues: Sequence[str], most: int | None, split: Any, variant: str) -> list[StateRecord]:
        """Questions of these dialogues, with x1 and x2 of a variant."""
        records = choose(self.records, dialogues, most, self.cfg.categories)
        made = with_variant(variant, records, self._sources, self._llm, self._chooser) if records else []
        return [replace(record, split=split) for record in made]

    @cached_property
    def _chooser(self) -> Chooser | None:
        model, path = self.cfg.chooser, self.out / "chosen.json"
        return None if model is None else Chooser(model, path, self.cfg.answer_dtype, self.cfg.build.device)

    @cached_property
    def _llm(self) -> AuxiliaryLLM:
        return open_llm(self.cfg.build.llm, SentenceEncoder(device=self.cfg.build.device))

    def write(self, folder: Path, records: Sequence[StateRecord]) -> Path:
        """A states folder, unless it is there."""
        if not folder.exists():
            # gold evidence is looked up in the files that the states were built from
            write_records(records, folder, {"inputs": read_manifest(self.out / "states")["inputs"]})
        return folder


class FoldRuns:
    """The runs of a fold and a seed."""

    def __init__(self, chain: Chain, fold: Fold, number: int, seed: int) -> None:
        self.chain, self.cfg, self.fold, self.number, self.seed = chain, chain.cfg, fold, number, seed
        self.out = chain.out / f"fold-{number}"

    def _folder(self, name: str) -> Path:
        return self.out / (f"seed-{self.seed}" if ARMS[name].trained else "untrained") / name

    def perform(self, name: str) -> None:
        """Train an arm and have it answer, as far as that has not been done."""
        asked, scored = [Asked()], []
        if name in PROBED:
            scored = [Asked(variant, level) for variant in self.cfg.probes for level in PROBES[variant]]
        if scored and self.cfg.probe_answers:
            asked, scored = [*asked, Asked(level="oracle"), *scored], []
        answers = self._folder(name) / "answers"
        if missing := [one for one in [*asked, *scored] if not (answers / f"{one.name}.jsonl").exists()]:
            model = self._model(name)
            backbone = load_backbone(model, dtype=self.cfg.answer_dtype, device=self.cfg.build.device)
            answerer = LocalAnswers(backbone, model, self.cfg.max_new_tokens, self.cfg.batch_size)
            about = {"fold": self.number, "seed": self.seed if ARMS[name].trained else None, "arm": name}
            for one in (one for one in missing if one in asked):
                rows = self._answer(answerer, one, answers / one.name)
                write_rows(answers / f"{one.name}.jsonl", [{**about, **one._asdict(), **row} for row in rows])
            if left := [one for one in missing if one in scored]:
                for one, rows in zip(left, self._score(backbone, left), strict=True):
                    write_rows(answers / f"{one.name}.jsonl", [{**about, **one._asdict(), **row} for row in rows])

    def _answer(self, answerer: LocalAnswers, asked: Asked, out: Path) -> list[dict[str, object]]:
        """The outcome of every test question."""
        records = self._tested(asked.variant)
        states = self.out / "states" / f"test-{asked.variant}"
        evaluation = EvaluateConfig(
            states=str(self.chain.write(states, records)),
            model=str(answerer.about["name"]),
            out=str(out),
            conditions=[asked.level],
            max_new_tokens=answerer.max_new_tokens,
            batch_size=answerer.batch_size,
            corpus=paths_of(self.cfg.build.input) if asked.level == "oracle" else [],
            corpus_format=self.cfg.build.format,
        )
        run_evaluation(evaluation, answerer=answerer)
        by_id = {record.question_id: record for record in records}
        sure: dict[str, float] = {}
        if asked.level in LEVELS:
            found = log_probabilities(answerer.backbone, [[(record, asked.level)] for record in records])
            sure = {record.question_id: one for record, [one] in zip(records, found, strict=True)}
        rows = (row for _, row in read_rows(out / PREDICTIONS, "an output"))
        return [
            outcome(row, by_id[row["question_id"]]) | {"log_probability": sure.get(row["question_id"])} for row in rows
        ]

    def _score(self, backbone: Backbone, asked: Sequence[Asked]) -> list[list[dict[str, object]]]:
        """log p of the gold answers alone, a list for each of what is asked."""
        states = [[(record, one.level) for record in self._tested(one.variant)] for one in asked]
        found = log_probabilities(backbone, list(zip(*states, strict=True)))
        about = [{name: getattr(r, name) for name in ("question_id", "dialogue_id", "category")} for r, _ in states[0]]
        sure = zip(*found, strict=True)
        return [[{**a, "log_probability": value} for a, value in zip(about, own, strict=True)] for own in sure]

    def _tested(self, variant: str) -> list[StateRecord]:
        return self.chain.chosen(self.fold.test, self.cfg.test_questions, "test", variant)

    def _model(self, name: str) -> str:
        """The model of an arm, trained first where it is not there."""
        arm, folder, begins = ARMS[name], self._folder(name), self.cfg.begins(name)
        if not arm.trained:
            return self.cfg.model
        model = folder / "model"
        if not model.exists():
            start = self.cfg.model if begins is None else self._model(begins)
            self._train(self._settings(arm, start, self._states(arm, start, folder), folder / "train"))
            export(ExportConfig(run=str(folder / "train"), out=str(model)))
        # several times the model, and of no more use
        for checkpoint in checkpoints(folder / "train"):
            shutil.rmtree(checkpoint)
        return str(model)

    def _states(self, arm: Arm, start: str, folder: Path) -> Path:
        """The states that an arm learns from, with the dev questions."""
        role = "pool" if arm.pool else "labelled"
        # answers that a model gave are those of one run
        decoded = arm.labels == "decoded"
        labels = "gold" if arm.labels == "gold" else "none"
        variant = self.cfg.sft_variant if arm.start is None else arm.variant
        states = folder / "states" if decoded else self.out / "states" / f"{role}-{variant}-{labels}"
        if states.exists():
            return states
        asked = self.chain.chosen(getattr(self.fold, role), self.cfg.questions, "train", variant)
        if arm.labels != "gold":
            asked = [replace(record, target=None) for record in asked]
        if decoded:
            backbone = load_backbone(start)
            prompts = [record.x2.text for record in asked]
            answers = generate(backbone, prompts, self.cfg.max_new_tokens, self.cfg.batch_size)
            # an empty one is left out of the training
            asked = [replace(r, target=a.text if a else None) for r, a in zip(asked, answers, strict=True)]
        return self.chain.write(states, [*asked, *self._dev])

    @cached_property
    def _dev(self) -> list[StateRecord]:
        return self.chain.chosen(self.fold.dev, self.cfg.dev_questions, "dev", "built")

    def _settings(self, arm: Arm, start: str, states: Path, out: Path) -> TrainConfig:
        cfg = self.cfg
        objective = Objective(lambda_hard=1.0, edges=(), hard_levels=cfg.sft_levels if arm.start is None else (0,))
        if arm.aligns:
            objective = cfg.objective if arm.labels == "gold" else replace(cfg.objective, lambda_hard=0.0)
        rate, steps = cfg.pra_lr if arm.aligns else cfg.sft_lr, cfg.sft_steps if arm.start is None else cfg.pra_steps
        data = DataConfig(
            on_long="skip",
            unlabelled="x2" if arm.labels in ("none", "on_policy") else "skip",
            targets="on_policy" if arm.labels == "on_policy" else "gold",
            max_decoded=cfg.max_new_tokens,
            cache=str(self.chain.out / "cache"),
        )
        loop = replace(cfg.trainer, learning_rate=rate, max_steps=steps)
        learning = TrainConfig(str(states), str(out), start, seed=self.seed, resume=True, lora=cfg.lora)
        return replace(learning, objective=objective, data=data, trainer=loop)

    def _train(self, settings: TrainConfig) -> None:
        """Train, or go on; log p of the gold answers to dev questions are rows of kind probe in metrics.jsonl."""
        if not (self.cfg.trace_every and self._dev):
            train(settings)
            return
        base = load_backbone(settings.model)

        def measure(model: Any) -> dict[str, float]:
            model.eval()
            found = log_probabilities(replace(base, model=model), [[(record, "x0")] for record in self._dev])
            return {"log_probability": fmean(value for [value] in found)}

        train(settings, Probe(measure, self.cfg.trace_every))
