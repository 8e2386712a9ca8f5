"""Answer every question of a split under each condition, judge the answers, write the report."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter

from remind.build.plan import versions
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import input_hashes, sha256_file, sha256_json, write_json, write_text
from remind.core.processes import device_of
from remind.core.progress import ProgressBar, warn
from remind.core.run_folder import REPORT, RunFolder
from remind.data.dialogue import Corpus
from remind.data.readers import mapping_files, read
from remind.evaluation.answerers import Answerer, ChatAnswers, FixedAnswers, LocalAnswers, VLLMAnswers
from remind.evaluation.compare import differences
from remind.evaluation.config import CONDITIONS, CONTROLS, SETS, EvaluateConfig
from remind.evaluation.contexts import (
    Asked,
    Contexts,
    Prompt,
    Prompter,
    Stream,
    bare,
    most_frequent,
    questions_of,
    stream_of,
)
from remind.evaluation.judge import LongMemEvalJudge
from remind.evaluation.predictions import PASSING, PREDICTIONS, appending, claimed, part_name, read_rows
from remind.evaluation.scores import score_stage
from remind.evaluation.tables import html, table
from remind.evaluation.team import Team, join
from remind.llm.client import Chats
from remind.models import BUILT_IN
from remind.models.backbone import load_backbone
from remind.models.chat import Content, prompt_text
from remind.models.generate import Generation
from remind.models.images import ImageFiles, Pictures, content_of
from remind.perception.auxiliary import ChatLLM, OfflineLLM
from remind.states import prompts
from remind.states.dataset import CARD, MANIFEST, States, iterate_states, read_manifest
from remind.states.records import StateRecord
from remind.train_pra.config import images_in_training

if TYPE_CHECKING:
    from remind.llm.request import ChatModel, Stage
    from remind.models.encoder import SentenceEncoder
    from remind.perception.auxiliary import AuxiliaryLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction(Generation):
    """A row on disk: an output, what its prompt showed, and sixteen hex digits of its SHA-256 as the model read it.

    Attributes:
        evidence_shown, images_shown, cut_turns, left_out: as in `Prompt`.
    """

    question_id: str
    prompt: str
    evidence_shown: tuple[str, ...] | None
    images_shown: tuple[int, ...] | None
    cut_turns: int = 0
    left_out: str | None = None

    def row(self) -> dict[str, Any]:
        """The row of predictions.jsonl."""
        return {"question_id": self.question_id, **asdict(self)}


_ROW = TypeAdapter(Prediction)


def predictions(path: Path) -> Iterator[Prediction]:
    """The outputs in a file; of a question that was answered twice the later counts.

    Raises:
        DataError: a line that is no output.
    """
    return (row for _, row in read_rows(path, "an output", lambda line: _ROW.validate_json(line, strict=True)))


def adopt_parts(folder: Path) -> None:
    """Move what other processes have answered, for this run or for one that was killed, to predictions.jsonl.

    Raises:
        DataError: a line that is no output.
    """
    for part in sorted(folder.glob(part_name("*"))):
        rows = list(predictions(part))
        with appending(folder / PREDICTIONS) as put:
            for row in rows:
                put(row.row())
        # a process of a killed run that still writes does so to a file that is gone
        part.unlink()


class Task(NamedTuple):
    """What the processes of a run answer together.

    Attributes:
        folder: of the condition.
        blank: the rows, still without outputs.
        done: which questions were answered before.
    """

    folder: Path
    blank: list[Prediction]
    prompts: list[Content]
    done: list[bool]

    def row(self, place: int, output: Generation) -> dict[str, Any]:
        return replace(self.blank[place], **asdict(output)).row()


class Outputs:
    """The outputs of one condition in predictions.jsonl.

    Attributes:
        folder: of the condition.
        identity: what decides the outputs.
        resumed: how many of them were there before.
        seconds: spent in the model in this sitting.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        adopt_parts(folder)
        self.folder, self.identity = folder, identity
        self.resumed, self.seconds = 0, 0.0
        #: Of outputs that stand: their prompts' hashes.
        self._known = {one.question_id: one.prompt for one in self.read().values() if one.failure not in PASSING}
        self._any = bool(self._known)

    def read(self) -> dict[str, Prediction]:
        """The outputs so far by question id. Raises DataError."""
        return {one.question_id: one for one in predictions(self.folder / PREDICTIONS)}

    def add(
        self, ids: Sequence[str], prompts: Sequence[Prompt], answerer: Answerer, team: Team, bar: ProgressBar
    ) -> None:
        """Put those of the questions to the model that have no output yet; one row for each.

        Args:
            team: the processes that answer; this is the first of them.
            bar: counts the questions.

        Raises:
            ModelError: the model gave an output for none of the first questions it was tried on, or cannot be used at
                all; or another process has ended.
            ImagePathError: an image that cannot be used. ConfigError: images for a model that takes text alone.
        """
        begun = bar.n
        shown = [(name, [place.path for place in one.pictures]) for name, one in zip(ids, prompts, strict=True)]
        files: Sequence[Sequence[str]] = [()] * len(ids)
        if any(paths for _, paths in shown):
            if answerer.pictures is None:
                raise ConfigError(f"images pixels: {answerer.about['name']} takes text only; set images captions")
            files = answerer.pictures.check(shown)
        blank = [_blank(answerer.tokenizer, *one) for one in zip(ids, prompts, files, strict=True)]
        done = [self._known.get(one.question_id) == one.prompt for one in blank]
        self.resumed += sum(done)
        bar.skip(sum(done))
        with appending(self.folder / PREDICTIONS) as put:
            for row, prompt, known in zip(blank, prompts, done, strict=True):
                if not prompt.asks and not known:
                    put(replace(row, **asdict(prompt.output or Generation("", 0, finished=True))).row())
        asks = [n for n, prompt in enumerate(prompts) if prompt.asks]
        contents = [content_of(prompts[n].text, prompts[n].pictures) for n in asks]
        task = Task(self.folder, [blank[n] for n in asks], contents, [done[n] for n in asks])

        def told() -> None:
            # the other processes are about as far as this one
            bar.advance_to(min(begun + len(ids), bar.n + team.shard.count))

        before = time.perf_counter()
        if not all(task.done):
            team.share(task)
            outputs = [one for part in team.gather(answer_part(task, answerer, team, told)) for one in part]
            adopt_parts(self.folder)
            tried = [output for output in outputs if output.failure not in ("too_long", "unasked")]
            if tried and all(output.failure in PASSING for output in tried) and not self._any:
                name = answerer.about["name"]
                raise ModelError(f"{name} could be run on none of {len(tried)} questions: {tried[0].message}")
            self._any |= bool(tried)
        self.seconds += time.perf_counter() - before
        bar.advance_to(begun + len(ids))


def _blank(tokenizer: Any, question_id: str, prompt: Prompt, files: Sequence[str]) -> Prediction:
    """A row without its output.

    Args:
        tokenizer: as of an `Answerer`.
        files: hashes of the prompt's image files.
    """
    fixed, text = prompt.output, prompt.text
    if fixed is None and tokenizer is not None:
        text = prompt_text(tokenizer, content_of(prompt.text, prompt.pictures))
    shown: list[Any] = [text, *files]
    if fixed is not None:
        # an answer that came with its context: what it was shown may be another
        shown = ["", fixed.text, fixed.message, prompt.evidence, prompt.images, fixed.prompt_tokens, fixed.new_tokens]
    # escaped: a lone surrogate in a dialogue has no bytes of its own
    digest = hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]
    return Prediction(
        "",
        0,
        question_id=question_id,
        prompt=digest,
        evidence_shown=prompt.evidence,
        images_shown=prompt.images,
        cut_turns=prompt.cut_turns,
        left_out=prompt.left_out,
    )


def answer_part(task: Task, answerer: Answerer, team: Team, told: Callable[[], None] | None = None) -> list[Generation]:
    """What this process has to answer. Rows of the first go to predictions.jsonl, those of each other to a file of its
    own, which the first adds to it.

    Args:
        told: called for every output.
    """
    outputs: list[Generation] = []
    with appending(task.folder / part_name(team.shard.index)) as put:

        def keep(place: int, output: Generation) -> None:
            outputs.append(output)
            put(task.row(place, output))
            if told is not None:
                told()

        answerer.answer(task.prompts, [one.question_id for one in task.blank], task.done, keep)
    return outputs


#: Questions in memory at once, with their prompts.
_AT_ONCE = 512
_DRY = Generation("<answer>nothing was asked</answer><explanation></explanation>", 0, finished=True)
_UNASKED = Generation("", 0, failure="unasked", message="answers none")


def with_images(cfg: EvaluateConfig) -> EvaluateConfig:
    """With `images` and `image_tokens` as the model was trained, where they are None.

    Raises:
        DataError: a damaged training.json.
    """
    # the model of a server is a name
    named = cfg.answers == "server" or cfg.model in BUILT_IN
    images, tokens = images_in_training(None if named else cfg.model)
    return replace(cfg, images=cfg.images or images, image_tokens=cfg.image_tokens or tokens)


class Models:
    """The models of an evaluation, each loaded when it is first needed.

    Args:
        team: the processes that answer.
        judge, llm, answerer: as in `run_evaluation`.
    """

    def __init__(
        self,
        cfg: EvaluateConfig,
        team: Team,
        judge: AuxiliaryLLM | None = None,
        llm: AuxiliaryLLM | None = None,
        answerer: Answerer | None = None,
    ) -> None:
        self.cfg, self.llm, self._judge, self._answerer = cfg, llm, judge, answerer
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
        cfg, pixels = self.cfg, self.cfg.images == "pixels"
        if self._answerer is not None:
            return self._answerer
        if cfg.answers == "server":
            files = ImageFiles(cfg.image_tokens, cfg.image_root) if pixels else None
            return ChatAnswers(self._server("answer"), cfg.max_new_tokens, files)
        if cfg.answers == "none" or self.chats.dry is not None:
            return FixedAnswers("none", _UNASKED if self.chats.dry is None else _DRY)
        if cfg.answers == "vllm":
            return VLLMAnswers(cfg)
        backbone = load_backbone(cfg.model, dtype=cfg.dtype, device=self.device)
        pictures = Pictures(backbone, cfg.image_tokens, cfg.image_root) if pixels else None
        return LocalAnswers(backbone, cfg.model, cfg.max_new_tokens, cfg.batch_size, self.team.shard, pictures)

    @cached_property
    def judge(self) -> AuxiliaryLLM:
        if self._judge is not None:
            return self._judge
        kinds = {"llm": ChatLLM, "longmemeval": LongMemEvalJudge}
        return kinds[self.cfg.judge]({"judge": self._server("judge")}) if self.cfg.judge in kinds else OfflineLLM()

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


@dataclass(frozen=True)
class Result:
    """What an evaluation found.

    Attributes:
        report: what report.json holds.
        folder: of the run.
        held: a temporary folder is there as long as its result.
    """

    report: dict[str, Any]
    folder: Path
    held: object = None

    def table(self) -> str:
        """The tables as text."""
        return table(self.report)

    def save(self, folder: str | Path) -> Path:
        """Copy report, page and answers into a folder. Raises ConfigError for one that is not empty."""
        folder = Path(folder)
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder} is not empty; choose another folder")
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True)
        return folder


def run_evaluation(
    cfg: EvaluateConfig,
    judge: AuxiliaryLLM | None = None,
    llm: AuxiliaryLLM | None = None,
    answerer: Answerer | None = None,
    data: States | Corpus | Stream | None = None,
    providers: Mapping[str, Any] | None = None,
    corpus: Corpus | None = None,
    more: Callable[[dict[str, Any]], str] | None = None,
) -> dict[str, Any]:
    """See `EvaluateConfig`. Answers that `cfg.out` holds from an earlier run are not asked for again.

    Questions are answered as they are read, some hundreds in memory at a time. Several processes of one launch answer
    together; the first does all else.

    Args:
        judge: any backend, in place of the one `cfg.judge` names.
        llm: writes the summaries of the altered order, in place of what `cfg.llm.summary` names.
        answerer: answers, in place of the model.
        data: a states dataset, filtered or mapped as one likes, or dialogues with questions, in place of the folder.
        providers: context providers (see `provide`) by name, for names in `cfg.conditions` that are none of ours.
        corpus: the dialogues of the states, in place of those that `cfg.corpus` names.
        more: adds to the report before it is written; returns HTML for the page.

    Returns:
        What report.json holds: counts, `overall`, `by_format`, `by_dimension`, `by_dimension_and_format`,
        `by_category` (rows of `summarise`) of the reference condition, the same of each under `conditions`,
        `differences`, identity, versions. After a dry run: `dry_run`, what would have been asked. Nothing on
        processes other than the first.

    Raises:
        DataError, FormatError: states, dialogue files or earlier rows that cannot be used.
        ModelError: a model or judge that cannot be loaded or run, or does not generate; another process has ended.
        ConfigError: an unknown judge or condition, an `out` that holds something else, or several processes where not
            a local model answers.
    """
    team = join()
    cfg = with_images(cfg)
    models = Models(cfg, team, judge, llm, answerer)
    dry = models.chats.dry
    if not team.leads:
        # a dry run is the first process's alone: its file has one writer
        if dry is None:
            _follow(models)
        return {}
    if models.team.shard.count > 1 and (cfg.answers != "local" or answerer is not None):
        raise ConfigError("only questions to a local model (answers local) can be distributed; start one process")
    manifest = read_manifest(cfg.states) if data is None else {}
    if isinstance(data, Corpus):
        data = stream_of(data, cfg.split, cfg.limit)
    job = _Job(cfg, models, manifest, cfg.states if data is None else data, providers or {}, corpus)
    if dry is None:
        return job.run(more)
    # a dry run notes what would be asked; nothing that it writes stays
    with tempfile.TemporaryDirectory(prefix="remind-dry-") as folder:
        job.cfg = replace(cfg, out=str(Path(folder) / "out"))
        job.run(more)
    print(dry.report())
    return {"dry_run": models.chats.ledger.summary()}


def _follow(models: Models) -> None:
    """Answer what the first process deals out until it has no more."""
    team = models.team
    team.gather(models.answerer.key)
    while (task := team.share()) is not None:
        team.gather(answer_part(task, models.answerer, team))


@dataclass
class _Job:
    """One evaluation on the first process.

    Attributes:
        known: of model, images, dialogues and summariser, what identifies them.
    """

    cfg: EvaluateConfig
    models: Models
    manifest: Mapping[str, Any]
    data: States | Stream
    providers: Mapping[str, Any]
    corpus: Corpus | None
    known: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """What the states were tailored to; states that do not say so, to the gold dimension."""
        return str(self.manifest.get("kind", "gold"))

    def run(self, more: Callable[[dict[str, Any]], str] | None) -> dict[str, Any]:
        cfg, models = self.cfg, self.models
        questions = self._questions()
        prompter = self._prompter()
        # what is missing is known before anything is written
        keys = models.team.gather(models.answerer.key)
        if set(keys) != {keys[0]}:
            raise ConfigError(f"{cfg.model} is not the same model for every process")
        self.known["model"] = keys[0]
        if models.answerer.pictures is not None:
            self.known["pictures"] = models.answerer.pictures.name
        _ = models.judge, models.encoder
        records: list[StateRecord] = []
        with self._claimed() as outputs:
            with ProgressBar("answer", questions.total * len(outputs)) as bar:
                for part in _portions(questions.asked()):
                    batch = [record for one in part for record in one.records]
                    for name, own in outputs.items():
                        prompts = [prompt for one in part for prompt in prompter.prompts(name, one)]
                        own.add([record.question_id for record in batch], prompts, models.answerer, models.team, bar)
                    records += map(bare, batch)
            models.team.share()  # that there is no more to answer
            return self._report(records, outputs, more)

    def _questions(self) -> Stream:
        """The questions.

        Raises:
            DataError, FormatError: states or dialogue files that cannot be used.
            ConfigError: no questions, an unknown condition, or one that needs states, or dialogue files that are not
                named.
        """
        cfg, data = self.cfg, self.data
        ours = [name for name in cfg.names if name not in self.providers]
        if unknown := [name for name in ours if name not in CONDITIONS]:
            there = ", ".join((*CONDITIONS, *SETS, *self.providers))
            raise ConfigError(f"no condition {unknown[0]!r}; there are {there}")
        if isinstance(data, Stream):
            if bound := [name for name in ours if name not in ("no_context", "full_context", "oracle", *CONTROLS)]:
                raise ConfigError(f"{bound[0]} needs states; build them with `remind build-states`")
            if not data.total:
                raise ConfigError("there are no questions to ask")
            self.known["corpus"] = data.key
            return data
        if wanting := [name for name in cfg.names if name in self.providers or CONDITIONS[name].corpus]:
            self._read_corpus(wanting[0])
        return questions_of(data, cfg.split, cfg.limit, self.corpus)

    def _read_corpus(self, name: str) -> None:
        cfg = self.cfg
        if self.corpus is not None:
            return
        if not cfg.corpus:
            raise ConfigError(f"{name} needs the dialogues: set corpus to the files the states were built from")
        files: list[str | Path] = [*cfg.corpus, *mapping_files(cfg.corpus_format)]
        self.known["corpus"] = hashes = input_hashes(files)
        for file, digest in hashes.items():
            # files of one name in several folders are told apart by what they hold
            if digest not in self.manifest.get("inputs", {}).values():
                what = f"{file} is not a file that they were built from, or has changed since; name those files"
                raise DataError(what, cfg.states)
        images = self.manifest.get("config", {}).get("images") if cfg.images == "pixels" else None
        self.corpus = Corpus.merge([read(path, cfg.corpus_format, images) for path in cfg.corpus], cfg.corpus)

    def _prompter(self) -> Prompter:
        cfg, models, contexts, llm, frequent = self.cfg, self.models, None, None, dict[str, str]()
        if any(CONDITIONS[name].corpus for name in cfg.names if name in CONDITIONS):
            contexts = partial(Contexts, models.encoder, cfg.context)
        if "altered" in cfg.names:
            _ = models.answerer  # summaries may cost money: the model that answers must be there first
            llm = models.summariser()
            self.known["llm"] = llm.name
        if "most_frequent" in cfg.names and not isinstance(self.data, Stream):
            frequent = most_frequent(iterate_states(self.data, "train"))
        return Prompter(contexts, llm, self.kind, cfg.images == "pixels", self.providers, frequent)

    @contextmanager
    def _claimed(self) -> Iterator[dict[str, Outputs]]:
        """The outputs of every condition, in a folder of its own in `out` (`out` itself where it is the only one); for
        the time of the block no other evaluation writes there."""
        cfg, out = self.cfg, Path(self.cfg.out)
        states = "" if isinstance(self.data, Stream) else states_hash(self.data)
        several = len(cfg.names) > 1
        with ExitStack() as stack:
            if several:
                shared = {"states": states, "split": cfg.split, "limit": cfg.limit, "conditions": "a folder each"}
                stack.enter_context(claimed(out, shared, cfg.overwrite))
            outputs = {}
            for name in cfg.names:
                folder, identity = out / name if several else out, self._identity(name, states)
                outputs[name] = Outputs(stack.enter_context(claimed(folder, identity, cfg.overwrite)), identity)
            RunFolder(out).write(cfg)
            yield outputs

    def _identity(self, name: str, states: str) -> dict[str, Any]:
        """Everything that decides the outputs of a condition.

        Args:
            states: hash of the states.
        """
        cfg, wanted = self.cfg, ["model", "pictures"]
        shared = ("split", "limit", "max_new_tokens", "answers", "device", "dtype")
        identity = {"states": states, "level": name, **{key: getattr(cfg, key) for key in shared}}
        if cfg.answers == "server" and (endpoint := cfg.llm.answer or cfg.llm.default) is not None:
            identity["endpoint"] = {key: asdict(endpoint)[key] for key in ("temperature", "max_tokens", "extra_body")}
        if cfg.answers == "vllm":
            identity["max_model_len"] = cfg.vllm.max_model_len
        if name not in CONDITIONS:
            wanted.append("corpus")
        elif CONDITIONS[name].corpus:
            identity["context"] = {**asdict(cfg.context), "encoder": cfg.encoder}
            wanted += ["corpus", *(["llm"] if name == "altered" else [])]
        return identity | {key: self.known[key] for key in wanted if key in self.known}

    def _report(
        self,
        records: Sequence[StateRecord],
        outputs: Mapping[str, Outputs],
        more: Callable[[dict[str, Any]], str] | None,
    ) -> dict[str, Any]:
        """Judge, score and report, in folders that are held."""
        cfg, models = self.cfg, self.models
        scored = {name: score_stage(records, own, models.judge, models.encoder, cfg) for name, own in outputs.items()}
        # what the others are compared with: x0, which is what inference sees, else the first
        base = "x0" if "x0" in cfg.names else cfg.names[0]
        judge, costs = models.judge.name, models.chats.ledger.summary()
        kept = ("inputs", "config_hash", "prompts", "llm", "grounding_tokenizer", "abstention")
        about = {
            "format": "remind-evaluation-report",
            "model": models.answerer.about,
            "states": {"kind": self.kind, **{key: self.manifest.get(key) for key in kept}},
            "prompts": {one: prompts.fingerprint(one) for one in (*prompts.RENDERED, "ask_summary", "ask_judge")},
            "machine": machine(cfg.device),
            "versions": versions(),
            "costs": costs if costs["total"]["requests"] else None,
            # by stage how many items the offline stand-in wrote because an endpoint failed
            "stood_in": dict(Counter(one.stage for one in (() if models.llm is None else models.llm.failures))),
        }
        # other judges have no prompt of ours; what they are is in their names
        prompt = prompts.fingerprint("ask_judge") if judge.startswith("chat-") else None
        scoring = {"judge": judge, "judge_prompt": prompt, "encoder": cfg.encoder}
        single = {
            name: {
                **about,
                "identity": {**outputs[name].identity, **scoring, "bootstrap": cfg.bootstrap, "seed": cfg.seed},
                "config": {**asdict(cfg), "level": name},
                **item.section,
            }
            for name, item in scored.items()
        }
        if len(scored) > 1:
            for name in scored:
                write_json(outputs[name].folder / REPORT, single[name])
        report = {
            **single[base],
            "reference": base,
            "conditions": {name: item.section for name, item in scored.items()},
            "differences": {
                name: differences(scored[base].rows, item.rows, resamples=cfg.bootstrap, seed=cfg.seed)
                for name, item in scored.items()
                if name != base
            },
        }
        added, out = "" if more is None else more(report), Path(cfg.out)
        write_text(out / "report.html", html(report, {name: item.scores for name, item in scored.items()}, added))
        write_json(out / REPORT, report)
        if empty := report["counts"]["empty"]:
            warn(f"{empty} of {report['counts']['answered']} answers are empty: the model may not know this language")
        return report


def _portions(asked: Iterable[Asked]) -> Iterator[list[Asked]]:
    """Whole dialogues, some hundreds of questions together: enough for batches of like length."""
    part: list[Asked] = []
    for one in asked:
        part.append(one)
        if sum(len(one.records) for one in part) >= _AT_ONCE:
            yield part
            part = []
    if part:
        yield part


def states_hash(states: States) -> str:
    """Hash of a states folder by its card, which has one of all parts, and manifest; of a dataset its fingerprints."""
    if not isinstance(states, str | Path):
        parts = states if isinstance(states, Mapping) else {"": states}
        return sha256_json({str(name): part._fingerprint for name, part in parts.items()})
    return sha256_json([sha256_file(Path(states) / name) for name in (CARD, MANIFEST)])


def machine(device: str) -> str:
    """The machine in words."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return f"{platform.machine()}, {torch.cuda.get_device_name(torch.device(device))}"
    return f"{platform.machine()}, {platform.system()}, {torch.get_num_threads()} threads"
