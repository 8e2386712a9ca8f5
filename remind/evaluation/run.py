"""Answer every question of a split under each condition, judge the answers, write the report."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from remind.build.plan import versions
from remind.core.errors import ConfigError
from remind.core.files import write_json, write_text
from remind.core.processes import device_of
from remind.data.dialogue import Corpus
from remind.data.readers import mapping_files, read
from remind.evaluation.answerers import Answerer, ChatAnswers, FixedAnswers, LocalAnswers
from remind.evaluation.compare import condition_differences
from remind.evaluation.conditions import Prompter, Questions, load_questions
from remind.evaluation.config import CONDITIONS, EvaluateConfig
from remind.evaluation.contexts import Contexts
from remind.evaluation.identity import answer_identity, corpus_hashes, machine, score_identity, states_hash
from remind.evaluation.images import pictures_for, with_images
from remind.evaluation.judge import load_judge
from remind.evaluation.predictions import RunFolder, held
from remind.evaluation.report import write_report
from remind.evaluation.stages import answer_part, answer_stage, score_stage
from remind.evaluation.tables import table
from remind.evaluation.team import Team, join
from remind.evaluation.vllm_answers import VLLMAnswers
from remind.llm.auxiliary import ChatLLM, OfflineLLM
from remind.llm.client import Chats
from remind.models.backbone import load_backbone
from remind.states import prompts
from remind.states.dataset import States, read_manifest

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

    from remind.llm.auxiliary import AuxiliaryLLM
    from remind.llm.request import ChatModel, Stage
    from remind.models.encoder import SentenceEncoder


class Models:
    """The models of an evaluation, each loaded when it is first needed.

    Args:
        team: the processes that answer.
        judge, llm, chat, answerer: as in `evaluate`.
    """

    def __init__(
        self,
        cfg: EvaluateConfig,
        team: Team,
        judge: AuxiliaryLLM | None = None,
        llm: AuxiliaryLLM | None = None,
        chat: ChatModel | None = None,
        answerer: Answerer | None = None,
    ) -> None:
        self.cfg, self.llm, self._judge, self._chat, self._answerer = cfg, llm, judge, chat, answerer
        self.chats = Chats(cfg.llm)
        # in a dry run no model answers
        self.team = team if self.chats.dry is None else Team()
        self.device = device_of(cfg.device, int(os.environ.get("LOCAL_RANK", "0")))

    @cached_property
    def encoder(self) -> SentenceEncoder:
        from remind.models.encoder import SentenceEncoder

        return SentenceEncoder(self.cfg.encoder, self.device)

    @cached_property
    def answerer(self) -> Answerer:
        cfg = self.cfg
        if self._answerer is not None:
            return self._answerer
        if cfg.answers == "server":
            return ChatAnswers(self._chat or self._server("answer"), cfg.max_new_tokens)
        if self.chats.dry is not None:
            return FixedAnswers("dry run", lambda _: "<answer>nothing was asked</answer><explanation></explanation>")
        if cfg.answers == "vllm":
            return VLLMAnswers(cfg.model, cfg.max_new_tokens, cfg.dtype, cfg.vllm)
        backbone = load_backbone(cfg.model, dtype=cfg.dtype, device=self.device)
        pictures = pictures_for(cfg, backbone)
        return LocalAnswers(backbone, cfg.model, cfg.max_new_tokens, cfg.batch_size, self.team.shard, pictures)

    @cached_property
    def judge(self) -> AuxiliaryLLM:
        if self._judge is not None:
            return self._judge
        return ChatLLM({"judge": self._server("judge")}) if self.cfg.judge == "llm" else load_judge(self.cfg.judge)

    @property
    def dealt(self) -> bool:
        """Whether several processes can answer together."""
        return self.cfg.answers == "local" and self._answerer is None

    def summariser(self) -> AuxiliaryLLM:
        """Writes the summaries of the altered order."""
        if self.llm is None:
            stand_in, chat = OfflineLLM(self.encoder), self.chats.stage("summary")
            self.llm = stand_in if chat is None else ChatLLM({"summary": chat}, stand_in)
        return self.llm

    def _server(self, stage: Stage) -> ChatModel:
        chat = self.chats.stage(stage)
        if chat is None:
            raise ConfigError(f"there is no endpoint for stage {stage}; set llm.{stage} or llm.default")
        return chat


def evaluate(
    cfg: EvaluateConfig,
    judge: AuxiliaryLLM | None = None,
    llm: AuxiliaryLLM | None = None,
    chat: ChatModel | None = None,
    answerer: Answerer | None = None,
    states: DatasetDict | Dataset | None = None,
) -> dict[str, Any]:
    """See `EvaluateConfig`. Answers and verdicts that `cfg.out` holds from an earlier run are not asked for again.

    Several processes of one launch answer together; the first does all else.

    Args:
        judge: any backend, in place of the one `cfg.judge` names.
        llm: writes the summaries of the altered order, in place of what `cfg.llm.summary` names.
        chat: answers, in place of `cfg.llm.answer`, where `cfg.answers` is server.
        answerer: answers, in place of both.
        states: a states dataset, filtered or mapped as one likes, in place of the folder.

    Returns:
        What report.json holds: counts, `overall`, `by_format`, `by_dimension`, `by_dimension_and_format`,
        `by_category` (rows of `summarise`) of the reference condition, the same of each under `conditions`,
        `differences`, identity, versions. After a dry run: `dry_run`, what would have been asked. Nothing on
        processes other than the first.

    Raises:
        DataError, FormatError: states, dialogue files or earlier rows that cannot be used.
        ModelError: a model or judge that cannot be loaded or run, or does not generate; another process has failed.
        ConfigError: an unknown judge or condition, an `out` that holds something else, or several processes where not
            a local model answers.
    """
    team = join()
    cfg = with_images(cfg)
    if not team.leads:
        # a dry run is the first process's alone: its file has one writer
        if cfg.llm.dry_run is None:
            _follow(Models(cfg, team, judge, llm, chat, answerer))
        return {}
    models = Models(cfg, team, judge, llm, chat, answerer)
    dry = models.chats.dry
    if models.team.shard.count > 1 and not models.dealt:
        raise ConfigError("only questions to a local model (answers local) can be distributed; start one process")
    manifest = read_manifest(cfg.states) if states is None else {}
    data: States = cfg.states if states is None else states
    if dry is None:
        return _evaluate(cfg, models, manifest, data)
    # a dry run notes what would be asked; nothing that it writes stays
    with tempfile.TemporaryDirectory(prefix="remind-dry-") as folder:
        _evaluate(replace(cfg, out=str(Path(folder) / "out")), models, manifest, data)
    print(dry.report())
    return {"dry_run": models.chats.ledger.summary()}


def _follow(models: Models) -> None:
    """Answer what the first process deals out until it has no more."""
    team = models.team
    team.gather(lambda: models.answerer.key)
    while (task := team.share()) is not None:
        team.gather(lambda task=task: answer_part(task, models.answerer, team))


def _evaluate(cfg: EvaluateConfig, models: Models, manifest: Mapping[str, Any], states: States) -> dict[str, Any]:
    known: dict[str, Any] = {}
    questions = _questions(cfg, models, manifest, known, states)
    # what is missing is known before anything is written
    keys = models.team.gather(lambda: models.answerer.key)
    if set(keys) != {keys[0]}:
        raise ConfigError(f"{cfg.model} is not the same model for every process")
    known["model"] = keys[0]
    if cfg.images == "pixels":
        known["pictures"] = models.answerer.check_pictures(questions.shown())
    _ = models.judge, models.encoder
    with _claimed(cfg, known, states_hash(states)) as runs:
        return _run(cfg, models, manifest, questions, runs)


def _run(
    cfg: EvaluateConfig,
    models: Models,
    manifest: Mapping[str, Any],
    questions: Questions,
    runs: Mapping[str, RunFolder],
) -> dict[str, Any]:
    """Answer, judge, score and report, in folders that are held."""
    answerer, judge, encoder, records = models.answerer, models.judge, models.encoder, questions.records
    answers = {
        name: answer_stage(records, questions.prompts[name], answerer, runs[name], models.team) for name in cfg.names
    }
    models.team.share()  # that there is no more to answer
    scored = {name: score_stage(records, item, runs[name], judge, encoder, cfg) for name, item in answers.items()}

    started = time.perf_counter()
    # what the others are compared with: x0, which is what inference sees, else the first
    base = "x0" if "x0" in cfg.names else cfg.names[0]
    about = _about(cfg, models, manifest)
    single = {
        name: {
            **about,
            "identity": score_identity(cfg, runs[name].identity, judge.name),
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
    if empty := report["counts"]["empty"]:
        number = report["counts"]["answered"]
        print(f"warning: {empty} of {number} answers are empty: the model may not know this language", file=sys.stderr)
    return report


def _questions(
    cfg: EvaluateConfig, models: Models, manifest: Mapping[str, Any], known: dict[str, Any], states: States
) -> Questions:
    """The questions and their prompts; notes in `known` which dialogue files and summaries the prompts are made of.

    Raises:
        DataError, FormatError: states or dialogue files that cannot be used.
        ConfigError: a condition that needs dialogue files that are not named.
    """
    from_corpus = [name for name in cfg.names if CONDITIONS[name].corpus]
    if not from_corpus:
        return load_questions(states, cfg.split, cfg.names, Prompter(pixels=cfg.images == "pixels"), cfg.limit)
    if not cfg.corpus:
        raise ConfigError(f"{from_corpus[0]} needs the dialogues: set corpus to the files the states were built from")
    known["corpus"] = corpus_hashes([*cfg.corpus, *mapping_files(cfg.corpus_format)], manifest, cfg.states)
    corpus = Corpus.merge([read(path, cfg.corpus_format) for path in cfg.corpus], cfg.corpus)
    llm = None
    if "altered" in from_corpus:
        _ = models.answerer  # summaries may cost money: the model that answers must be there first
        llm = models.summariser()
        known["llm"] = llm.name
    kind, pixels = manifest.get("kind", "gold"), cfg.images == "pixels"
    prompter = Prompter(corpus, Contexts(models.encoder, cfg.context), llm, kind, pixels)
    return load_questions(states, cfg.split, cfg.names, prompter, cfg.limit)


@contextmanager
def _claimed(cfg: EvaluateConfig, known: Mapping[str, Any], states: str) -> Iterator[dict[str, RunFolder]]:
    """The folder of every condition (`out` itself where it is the only one); for the time of the block no other
    evaluation writes there."""
    out = Path(cfg.out)
    several = len(cfg.names) > 1
    with ExitStack() as stack:

        def claimed(folder: Path, identity: Mapping[str, Any]) -> RunFolder:
            stack.enter_context(held(folder, cfg.overwrite))
            return RunFolder(folder, identity, cfg.overwrite)

        if several:
            claimed(out, {"states": states, "split": cfg.split, "limit": cfg.limit, "conditions": "a folder each"})
        runs = {
            name: claimed(out / name if several else out, answer_identity(cfg, name, states, known))
            for name in cfg.names
        }
        write_text(out / "config.yaml", yaml.safe_dump(asdict(cfg), sort_keys=False, allow_unicode=True))
        yield runs


def _about(cfg: EvaluateConfig, models: Models, manifest: Mapping[str, Any]) -> dict[str, Any]:
    """For the report: models, states, machine, versions, and what endpoints cost."""
    costs = models.chats.ledger.summary()
    kept = ("inputs", "config_hash", "prompts", "llm", "grounding_tokenizer", "abstention")
    # by stage how many items the offline stand-in wrote because an endpoint failed
    stood_in = Counter(failure.stage for failure in (() if models.llm is None else models.llm.failures))
    return {
        "format": "remind-evaluation-report",
        "config": asdict(cfg),
        "model": models.answerer.about,
        # earlier builds knew no other kind
        "states": {"kind": manifest.get("kind", "gold"), **{key: manifest.get(key) for key in kept}},
        "prompts": prompts.fingerprints(*prompts.RENDERED, "ask_summary", "ask_judge"),
        "machine": machine(cfg.device),
        "versions": versions(),
        "costs": costs if costs["total"]["requests"] else None,
        "stood_in": dict(stood_in),
    }


def evaluate_and_show(cfg: EvaluateConfig) -> None:
    """`evaluate`, then the tables and where the results are."""
    result = evaluate(cfg)
    if result and "dry_run" not in result:
        print(table(result))
        print(f"report: {Path(cfg.out) / 'report.html'}")
