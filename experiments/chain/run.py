"""From dialogue files to the answers of every arm; what is there is not made again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from experiments.chain.arms import ARMS, PROBES, Arm
from experiments.chain.config import FREE, ChainConfig
from experiments.chain.folds import Fold, choose, make_folds
from experiments.chain.report import outcome, report, value_of
from experiments.chain.variants import Source, with_variant
from remind.alignment.cache import Cache
from remind.alignment.checkpoint import FOLDER as CHECKPOINTS
from remind.alignment.config import DataConfig, ExportConfig, Objective, TrainConfig
from remind.alignment.export import export
from remind.alignment.guard import TERMINATED
from remind.alignment.model import fingerprint
from remind.alignment.run_folder import flatten
from remind.alignment.tokens import decode
from remind.core.errors import ConfigError
from remind.core.files import read_json, write_json, write_rows
from remind.core.processes import locked
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.evaluation import evaluate
from remind.evaluation.answerers import LocalAnswers
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.predictions import PREDICTIONS, read_rows
from remind.evaluation.scores import parse_all, score
from remind.llm.auxiliary import open_llm
from remind.models.encoder import SentenceEncoder
from remind.models.generate import generate
from remind.models.load import load_backbone
from remind.pipeline import build_states
from remind.states.auxiliary import AuxiliaryLLM
from remind.states.parquet import read_manifest, read_states
from remind.states.records import StateRecord
from remind.testbed.accuracy import MonitoredTrainer
from remind.testbed.ladder import write_records

SETTINGS = "settings.json"


def chain(cfg: ChainConfig) -> Path:
    """Do the stages asked for; prints where the results are.

    Returns:
        The folder of the results.

    Raises:
        ConfigError: settings that cannot be run, or other ones than those the folder was begun with.
        RemindError: of the first run that failed; what was done stays.
    """
    cfg = cfg.sized()
    out = Path(cfg.out)
    with locked(out / ".lock", wait=False):
        _claim(cfg, out)
        if cfg.stage != "report":
            Runs(cfg).run()
        if cfg.stage != "run":
            print(f"results are in {', '.join(str(path) for path in report(cfg))}")
    return out


def _claim(cfg: ChainConfig, out: Path) -> None:
    values = flatten(json.loads(json.dumps(asdict(cfg))))
    kept = {name: value for name, value in values.items() if name.split(".")[0] not in FREE}
    # processes and places of the build change nothing
    for name in ("workers", "cache", "device", "out", "overwrite", "shard"):
        kept.pop(f"build.{name}", None)
    path = out / SETTINGS
    if path.exists():
        before = read_json(path)
        if wrong := sorted(name for name in before.keys() | kept if before.get(name) != kept.get(name)):
            raise ConfigError(f"{out} was begun with other settings ({', '.join(wrong)}); choose another out")
    write_json(path, kept)


class Runs:
    """The runs of a configuration: a folder for every fold, seed and arm, with its training, model and answers."""

    def __init__(self, cfg: ChainConfig) -> None:
        self.cfg, self.out = cfg, Path(cfg.out)
        self._records: dict[int | None, list[StateRecord]] = {}

    def run(self) -> None:
        """All that is not there yet, fold by fold and arm by arm."""
        for cap in (None, *self.cfg.contexts):
            self.records(cap)
        folds = make_folds(self._inputs, self.cfg)
        for number in self.cfg.only_folds if self.cfg.only_folds is not None else range(self.cfg.folds):
            for seed in self.cfg.seeds:
                for name in self.cfg.plan:
                    self._perform(number, folds[number], seed, name)

    # states

    def records(self, cap: int | None = None) -> list[StateRecord]:
        """All states, built with the configured cap of retrieval or with another."""
        if cap not in self._records:
            build = self.cfg.build
            perception = build.perception
            if cap is not None:
                perception = replace(perception, retrieve=replace(perception.retrieve, max_context_tokens=cap))
            folder = self._built(cap)
            build_states(replace(build, out=str(folder), perception=perception, overwrite=False))
            self._records[cap] = read_states(folder)
        return self._records[cap]

    def _built(self, cap: int | None = None) -> Path:
        return self.out / ("states" if cap is None else f"states-{cap}")

    @cached_property
    def _corpora(self) -> dict[str, Corpus]:
        return {path: read(path, self.cfg.build.format) for path in self.cfg.build.inputs}

    @property
    def _inputs(self) -> dict[str, list[str]]:
        """Ids of the dialogues with usable questions, by input."""
        usable = {record.dialogue_id for record in self.records() if record.target is not None}
        return {path: [d.id for d in corpus.dialogues if d.id in usable] for path, corpus in self._corpora.items()}

    @cached_property
    def _sources(self) -> dict[str, Source]:
        return {q.id: (c.dialogue(q.dialogue_id), q) for c in self._corpora.values() for q in c.questions}

    @cached_property
    def _llm(self) -> AuxiliaryLLM:
        return open_llm(self.cfg.build.llm, SentenceEncoder(device=self.cfg.build.device))

    def _chosen(self, dialogues: Sequence[str], most: int | None, split: str, variant: str) -> list[StateRecord]:
        chosen = choose(self.records(), dialogues, most, self.cfg.categories)
        if not chosen:
            return []
        made = with_variant(variant, chosen, self._sources, self._llm, self.cfg.fold_seed)
        return [replace(record, split=split) for record in made]

    def _write(self, folder: Path, records: Sequence[StateRecord]) -> Path:
        if not folder.exists():
            # gold evidence is looked up in the files that the states were built from
            write_records(records, folder, {"inputs": read_manifest(self._built())["inputs"]})
        return folder

    def _test(self, fold: Fold, number: int, variant: str, cap: int | None = None) -> tuple[Path, list[StateRecord]]:
        """The folder of a fold's test questions, and the questions."""
        records = self._chosen(fold.test, self.cfg.test_questions, "test", variant)
        if cap is not None:
            shown = {record.question_id: record for record in self.records(cap)}
            records = [replace(shown[record.question_id], split="test") for record in records]
        name = f"test-{variant}" if cap is None else f"test-{cap}"
        return self._write(self.out / f"fold-{number}" / "states" / name, records), records

    # one run

    def _folder(self, number: int, seed: int, name: str) -> Path:
        seeded = f"seed-{seed}" if ARMS[name].trained else "untrained"
        return self.out / f"fold-{number}" / seeded / name

    def _perform(self, number: int, fold: Fold, seed: int, name: str) -> None:
        folder = self._folder(number, seed, name)
        missing = [asked for asked in self._asked(name) if not _answers(folder, asked).exists()]
        if missing:
            model = self._model(number, fold, seed, name)
            backbone = load_backbone(model)
            answerer = LocalAnswers(backbone, model, self.cfg.max_new_tokens, self.cfg.batch_size)
            for asked in missing:
                about = {"fold": number, "seed": seed if ARMS[name].trained else None, "arm": name}
                self._answer(answerer, folder, number, fold, asked, about)
        if not self.cfg.keep_models and not any(arm.start == name for arm in ARMS.values()):
            shutil.rmtree(folder / "model", ignore_errors=True)

    def _asked(self, name: str) -> Iterator[tuple[str, str, int | None]]:
        """Variant, level and cap of retrieval of everything that an arm answers from."""
        yield "built", "x0", None
        if name in self.cfg.probe_arms:
            yield "built", "oracle", None
            for variant in self.cfg.probes:
                yield from ((variant, level, None) for level in PROBES[variant])
        if name in self.cfg.context_arms:
            yield from (("built", "x0", cap) for cap in self.cfg.contexts)

    def _answer(
        self,
        answerer: LocalAnswers,
        folder: Path,
        number: int,
        fold: Fold,
        asked: tuple[str, str, int | None],
        about: Mapping[str, Any],
    ) -> None:
        variant, level, cap = asked
        states, records = self._test(fold, number, variant, cap)
        rows = _answers(folder, asked)
        evaluation = EvaluateConfig(
            states=str(states),
            model=str(answerer.about["name"]),
            out=str(rows.with_suffix("")),
            conditions=[level],
            max_new_tokens=answerer.max_new_tokens,
            batch_size=answerer.batch_size,
            corpus=self.cfg.build.inputs if level == "oracle" else [],
            corpus_format=self.cfg.build.format,
        )
        evaluate(evaluation, answerer=answerer)
        by_id = {record.question_id: record for record in records}
        about = {**about, "variant": variant, "level": level, "cap": cap}
        written = [row for _, row in read_rows(Path(evaluation.out) / PREDICTIONS, "an output")]
        write_rows(rows, [{**about, **outcome(row, by_id[row["question_id"]])} for row in written])

    def _model(self, number: int, fold: Fold, seed: int, name: str) -> str:
        """The model of an arm, trained first where it is not there."""
        arm, folder = ARMS[name], self._folder(number, seed, name)
        if not arm.trained:
            return self.cfg.model
        model = folder / "model"
        if not model.exists():
            start = self.cfg.model if arm.start is None else self._model(number, fold, seed, arm.start)
            states = self._states(number, fold, arm, start, folder)
            self._train(self._settings(arm, start, states, folder / "train", seed), fold)
            export(ExportConfig(run=str(folder / "train"), out=str(model)))
        # several times the model, and of no more use
        shutil.rmtree(folder / "train" / CHECKPOINTS, ignore_errors=True)
        return str(model)

    def _states(self, number: int, fold: Fold, arm: Arm, start: str, folder: Path) -> Path:
        """The states that an arm learns from, with the dev questions."""
        role = "pool" if arm.pool else "labelled"
        states = self.out / f"fold-{number}" / "states" / f"{role}-{arm.variant}-{arm.labels}"
        # answers that a model gave are those of one run
        states = folder / "states" if arm.labels == "decoded" else states
        if states.exists():
            return states
        train = self._chosen(getattr(fold, role), self.cfg.questions, "train", arm.variant)
        if arm.labels != "gold":
            train = [replace(record, target=None) for record in train]
        if arm.labels == "decoded":
            backbone = load_backbone(start)
            base, cache = fingerprint(backbone.model), Cache(self.out / "cache")
            answers = decode(backbone, train, "x2", self.cfg.max_new_tokens, cache, base)
            train = [replace(record, target=answers[record.question_id]) for record in train]
        return self._write(states, [*train, *self._dev(fold, arm.variant)])

    def _dev(self, fold: Fold, variant: str) -> list[StateRecord]:
        return self._chosen(fold.dev, self.cfg.dev_questions, "dev", variant) if self.cfg.dev_questions else []

    def _settings(self, arm: Arm, start: str, states: Path, out: Path, seed: int) -> TrainConfig:
        cfg = self.cfg
        levels = cfg.sft_levels if arm.start is None else (0,)
        objective = Objective(lambda_hard=1.0, edges=(), hard_levels=levels)
        if arm.aligns:
            objective = replace(cfg.objective, lambda_hard=cfg.label_share if arm.labels == "gold" else 0.0)
        rate, steps = cfg.pra_lr if arm.aligns else cfg.sft_lr, cfg.sft_steps if arm.start is None else cfg.pra_steps
        return TrainConfig(
            states=str(states),
            out=str(out),
            model=start,
            seed=seed,
            resume=True,
            objective=objective,
            data=DataConfig(
                on_long="skip",
                unlabelled="x2" if arm.labels == "none" else "skip",
                max_decoded=cfg.max_new_tokens,
                cache=str(self.out / "cache"),
            ),
            trainer=replace(cfg.trainer, lr=rate, max_steps=steps),
            lora=cfg.lora,
        )

    def _train(self, settings: TrainConfig, fold: Fold) -> None:
        """Train, or go on; the answers to dev questions stand in metrics.jsonl, in rows of kind `answers`."""
        every, dev = self.cfg.trace_every, self._dev(fold, "built")
        base = load_backbone(settings.model) if every else None

        def measure(trainer: MonitoredTrainer) -> None:
            assert base is not None
            backbone = replace(base, model=trainer.model)
            prompts = [record.x0.text for record in dev]
            outputs = [
                o for o in generate(backbone, prompts, self.cfg.max_new_tokens, self.cfg.batch_size) if o is not None
            ]
            # evidence is compared by sentence vectors, which a trace does without
            bare = [replace(record, evidence_lines=()) for record in dev]
            scores = score(bare, outputs, parse_all(bare, outputs), [None] * len(dev), lambda _: _no_vectors())
            values = [value for one in scores if (value := value_of(one.row())) is not None]
            mean = sum(values) / len(values) if values else None
            trainer.folder.record({"step": trainer.step, "kind": "answers", "questions": len(values), "score": mean})

        trainer = MonitoredTrainer(settings, measure, every)
        try:
            trainer.fit()
        finally:
            trainer.folder.close()
        trainer.finish()
        if trainer.stopped:
            raise SystemExit(TERMINATED)


def _no_vectors() -> Any:
    raise AssertionError("nothing is compared")


def _answers(folder: Path, asked: tuple[str, str, int | None]) -> Path:
    variant, level, cap = asked
    return folder / "answers" / f"{variant}-{level}{'' if cap is None else f'-{cap}'}.jsonl"
