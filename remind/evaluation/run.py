"""Answer every question of a split under each condition, judge the answers, write the report."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from remind.core.errors import ConfigError
from remind.core.files import write_json, write_text
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.evaluation.answerers import Answerer, ChatAnswers, FixedAnswers, LocalAnswers
from remind.evaluation.compare import condition_differences
from remind.evaluation.conditions import Prompter, Questions, load_questions
from remind.evaluation.config import CONDITIONS, EvaluateConfig
from remind.evaluation.contexts import Contexts
from remind.evaluation.identity import (
    answer_identity,
    corpus_hashes,
    machine,
    score_identity,
    states_hash,
    versions,
)
from remind.evaluation.judge import Verdicts, load_judge
from remind.evaluation.predictions import RunFolder
from remind.evaluation.report import write_report
from remind.evaluation.stages import Answers, Scored, answer_stage, judge_stage, read_answers, score_stage
from remind.evaluation.tables import table
from remind.llm.auxiliary import ChatLLM
from remind.llm.chat_models import Chats
from remind.llm.offline import OfflineLLM
from remind.models.load import load_backbone
from remind.states import prompts
from remind.states.parquet import read_manifest

if TYPE_CHECKING:
    from remind.llm.request import ChatModel, Stage
    from remind.models.encoder import SentenceEncoder
    from remind.states.auxiliary import AuxiliaryLLM


@dataclass
class Parts:
    """What an evaluation is made of: models, judge, encoder, endpoints; each loaded only by the stages that use it.

    Attributes:
        manifest: of the states.
        judge, llm, chat, given_answerer: in place of what the configuration names; `judge` and `llm` are what is used.
        known: what the identity of the answers needs to know of the parts: model, and for some conditions corpus, llm.
    """

    cfg: EvaluateConfig
    manifest: Mapping[str, Any]
    judge: AuxiliaryLLM | None = None
    llm: AuxiliaryLLM | None = None
    chat: ChatModel | None = None
    given_answerer: Answerer | None = None
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def answering(self) -> bool:
        return self.cfg.stage in ("all", "answer")

    @cached_property
    def chats(self) -> Chats:
        """The endpoints."""
        return Chats(self.cfg.llm)

    @cached_property
    def encoder(self) -> SentenceEncoder:
        from remind.models.encoder import SentenceEncoder

        return SentenceEncoder(self.cfg.encoder, self.cfg.device)

    @cached_property
    def answerer(self) -> Answerer:
        cfg = self.cfg
        if self.given_answerer is not None:
            return self.given_answerer
        if cfg.answers == "server":
            return ChatAnswers(self.chat or self._server("answer"), cfg.max_new_tokens)
        backbone = load_backbone(cfg.model, dtype=cfg.dtype, device=cfg.device)
        return LocalAnswers(backbone, cfg.model, cfg.max_new_tokens, cfg.batch_size)

    def questions(self) -> Questions:
        """The questions, and their prompts if this run answers.

        Raises:
            DataError, FormatError: states or dialogue files that cannot be used.
            ConfigError: a condition that needs dialogue files that are not named.
        """
        cfg = self.cfg
        names = cfg.names if self.answering else ()
        from_corpus = [name for name in names if CONDITIONS[name].corpus]
        if not from_corpus:
            return load_questions(cfg.states, cfg.split, names, None, cfg.limit)
        if not cfg.corpus:
            raise ConfigError(f"{from_corpus[0]} shows the dialogues: set corpus to the files the states were made of")
        self.known["corpus"] = corpus_hashes(cfg.corpus, self.manifest, cfg.states)
        corpus = Corpus.merge([read(path, cfg.corpus_format) for path in cfg.corpus], cfg.corpus)
        if "altered" in from_corpus:
            _ = self.answerer  # summaries may cost money: the model that answers must be there first
            self.llm = self.llm or self._summariser()
            self.known["llm"] = self.llm.name
        prompter = Prompter(names, corpus, Contexts(self.encoder, cfg.context), self.llm)
        return load_questions(cfg.states, cfg.split, names, prompter, cfg.limit)

    def load(self) -> None:
        """Load what the stages need, so that what is missing is known before anything is written.

        Raises:
            ModelError: a model that cannot be loaded or does not generate.
            ConfigError: an unknown judge.
        """
        cfg = self.cfg
        if cfg.stage in ("all", "report"):
            _ = self.encoder
        if cfg.stage not in ("all", "judge"):
            self.judge = None
        elif self.judge is None:
            llm = cfg.judge == "llm"
            self.judge = ChatLLM({"judge": self._server("judge")}) if llm else load_judge(cfg.judge)
        if self.answering:
            self.known["model"] = self.answerer.key

    def about(self) -> dict[str, Any]:
        """For the report: the answering model (its name alone where this run loads none), and what endpoints cost."""
        name_alone = {"name": self.cfg.model, "kind": None, "max_length": None}
        costs = self.chats.ledger.summary()
        kept = ("inputs", "config_hash", "prompts", "llm", "grounding_tokenizer")
        # by stage how many items the offline stand-in wrote because an endpoint failed
        stood_in = Counter(failure.stage for failure in (() if self.llm is None else self.llm.failures))
        return {
            "format": "remind-evaluation-report",
            "config": asdict(self.cfg),
            "model": self.answerer.about if self.answering else name_alone,
            "states": {key: self.manifest.get(key) for key in kept},
            "prompts": prompts.fingerprints(),
            "machine": machine(self.cfg.device),
            "versions": versions(),
            "costs": costs if costs["total"]["requests"] else None,
            "stood_in": dict(stood_in),
        }

    def _server(self, stage: Stage) -> ChatModel:
        chat = self.chats.stage(stage)
        if chat is None:
            raise ConfigError(f"there is no endpoint for stage {stage}; set llm.{stage} or llm.default")
        return chat

    def _summariser(self) -> AuxiliaryLLM:
        stand_in, chat = OfflineLLM(self.encoder), self.chats.stage("summary")
        return stand_in if chat is None else ChatLLM({"summary": chat}, stand_in)


def evaluate(
    cfg: EvaluateConfig,
    judge: AuxiliaryLLM | None = None,
    llm: AuxiliaryLLM | None = None,
    chat: ChatModel | None = None,
    answerer: Answerer | None = None,
) -> dict[str, Any]:
    """Run the stages that `cfg.stage` names; see `EvaluateConfig`.

    Args:
        judge: any backend, in place of the one `cfg.judge` names.
        llm: writes the summaries of the altered order, in place of what `cfg.llm.summary` names.
        chat: answers, in place of `cfg.llm.answer`, where `cfg.answers` is server.
        answerer: answers, in place of both.

    Returns:
        What report.json holds: counts, `overall`, `by_format`, `by_dimension`, `by_category` (rows of `summarise`) of
        the first condition, the same of each under `conditions`, `differences`, identity, versions. After stage answer
        or judge alone: by condition how many questions there are, and how many failed. After a dry run: `dry_run`, what
        would have been asked.

    Raises:
        DataError, FormatError: states, dialogue files or earlier rows that cannot be used.
        ModelError: a model or judge that cannot be loaded or run, or does not generate.
        ConfigError: an unknown judge or condition, or an `out` that holds something else.
    """
    manifest = read_manifest(cfg.states)
    if cfg.llm.dry_run is None:
        return _evaluate(cfg, Parts(cfg, manifest, judge, llm, chat, answerer))
    if cfg.answers == "local":
        nothing = "<answer>nothing was asked</answer><explanation></explanation>"
        answerer = answerer or FixedAnswers("dry run", lambda _: nothing)
    parts = Parts(cfg, manifest, judge, llm, chat, answerer)
    # a dry run notes what would be asked; nothing that it writes stays
    with tempfile.TemporaryDirectory(prefix="remind-dry-") as folder:
        out = Path(folder) / "out"
        if not parts.answering and Path(cfg.out).is_dir():
            shutil.copytree(cfg.out, out)
        _evaluate(replace(cfg, out=str(out)), parts)
    assert parts.chats.dry is not None
    print(parts.chats.dry.report())
    return {"dry_run": parts.chats.dry.summary()}


def _evaluate(cfg: EvaluateConfig, parts: Parts) -> dict[str, Any]:
    questions = parts.questions()
    parts.load()
    runs = _claim(cfg, parts)
    records = questions.records

    answers: dict[str, Answers] = {}
    for name in cfg.names:
        if parts.answering:
            answers[name] = answer_stage(records, questions.prompts[name], parts.answerer, runs[name])
        else:
            answers[name] = read_answers(records, runs[name])
    if cfg.stage == "answer":
        return {name: item.summary() for name, item in answers.items()}
    verdicts = {name: judge_stage(records, item, runs[name], parts.judge) for name, item in answers.items()}
    if cfg.stage == "judge":
        return {name: {**answers[name].summary(), **item.summary()} for name, item in verdicts.items()}
    scored = {
        name: score_stage(records, answers[name], verdicts[name], runs[name], parts.encoder, cfg) for name in cfg.names
    }
    return _report(cfg, parts, runs, scored, verdicts)


def _claim(cfg: EvaluateConfig, parts: Parts) -> dict[str, RunFolder]:
    """The folder of every condition (`out` itself where it is the only one), all checked before any is written to."""

    def claim(folder: Path, identity: Mapping[str, Any]) -> RunFolder:
        if parts.answering:
            return RunFolder(folder, identity, cfg.overwrite)
        return RunFolder.reopen(folder, identity)

    out, states = Path(cfg.out), states_hash(cfg.states)
    several = len(cfg.names) > 1
    if several:
        claim(out, {"states": states, "split": cfg.split, "limit": cfg.limit, "conditions": "a folder each"})
    runs = {
        name: claim(out / name if several else out, answer_identity(cfg, name, states, parts.known))
        for name in cfg.names
    }
    write_text(out / "config.yaml", yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True))
    return runs


def _report(
    cfg: EvaluateConfig,
    parts: Parts,
    runs: Mapping[str, RunFolder],
    scored: Mapping[str, Scored],
    verdicts: Mapping[str, Verdicts],
) -> dict[str, Any]:
    started = time.perf_counter()
    judges = {item.judge for item in verdicts.values() if item.judge != "none"}
    if len(judges) > 1:
        raise ConfigError(f"the conditions were judged by {', '.join(sorted(judges))}; run stage judge for all of them")
    judge = judges.pop() if judges else (parts.judge.name if parts.judge is not None else "none")
    # what the others are compared with: x0, which is what inference sees, else the first
    base = "x0" if "x0" in cfg.names else cfg.names[0]
    about = {**parts.about(), "config": asdict(cfg)}
    single = {
        name: {
            **about,
            "identity": score_identity(cfg, runs[name].identity, judge),
            "config": {**asdict(cfg), "level": name},
            **item.section,
        }
        for name, item in scored.items()
    }
    if len(scored) > 1:
        for name in scored:
            write_json(runs[name].folder / "report.json", single[name])
    report = {
        **single[base],
        "reference": base,
        "conditions": {name: item.section for name, item in scored.items()},
        "differences": condition_differences(
            {name: item.rows for name, item in scored.items()}, base, cfg.bootstrap, cfg.seed
        ),
    }
    report["seconds"] = {**report["seconds"], "comparing": time.perf_counter() - started}
    write_report(cfg.out, report, scored[base].scores, {name: item.scores for name, item in scored.items()})
    return report


def evaluate_and_show(cfg: EvaluateConfig) -> None:
    """`evaluate`, then the tables and where the results are."""
    result = evaluate(cfg)
    if "dry_run" in result:
        return
    if cfg.stage in ("answer", "judge"):
        for name, row in result.items():
            print(", ".join([name, *(f"{value} {key}" for key, value in row.items())]))
        print(f"answers: {cfg.out}" if cfg.stage == "answer" else f"verdicts: {cfg.out}")
        return
    print(table(result))
    print(f"report: {Path(cfg.out) / 'report.html'}")
