"""From dialogues to a folder of states: outline the corpus, build dialogue by dialogue, finish the folder.

A dialogue's files are written when it is done, with an account of it; the manifest and the dataset card are written
last. So a build that was killed goes on where it was, and several processes can build parts of one folder.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from multiprocessing import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.build.config import BuildStatesConfig
from remind.build.plan import Outline, Task, made_from, outline, shard_of, tasks
from remind.core.errors import ConfigError, ModelError
from remind.core.files import read_json, write_json
from remind.core.processes import cores, device_of, give_back_memory, locked, spawned_pool
from remind.core.progress import ProgressBar
from remind.data.dialogue import Corpus
from remind.grounding import Grounder
from remind.grounding.ground import check_saes, folder_of_saes, load_saes
from remind.llm.endpoints import LLMConfig
from remind.models.backbone import Backbone, BackboneSize, load_backbone, model_folder, size_of
from remind.models.encoder import SentenceEncoder
from remind.perception import Perception
from remind.perception.auxiliary import AuxiliaryLLM, ChatLLM, open_llm
from remind.reflect import quote_evidence, summarise
from remind.states.dataset import CARD, MANIFEST, finish, load_states, read_manifest, write_part
from remind.states.pyramid import LEVELS, AttentionalState, State
from remind.states.records import ABSENT, FACTUAL, StateRecord, evidence_share, marked_share, record_of

if TYPE_CHECKING:
    from datasets import DatasetDict

#: Share of its context that the dialogue may fill where a backbone reads all of x0 at once. The rest is for
#: instructions, strategy and question, and because the cap is counted in other tokens, those of the sentence encoder.
_DIALOGUE_SHARE = 0.75
#: What a build keeps in its folder until it is finished: stamp, locks, and an account of every dialogue.
_UNFINISHED = ".build"
#: Name of the account of a dialogue, by its number.
_ACCOUNT = "{:06d}.json"


def build_states(
    corpus: Corpus | str | Path | Sequence[str],
    backbone: str = "minilm",
    saes: str | Path | None = None,
    llm: LLMConfig | AuxiliaryLLM | None = None,
    levels: Any = LEVELS,
    out: str | Path | None = None,
    **settings: Any,
) -> DatasetDict:
    """The states of every question of a corpus, as a memory-mapped dataset: train, dev and test, those that exist.

    ```python
    states = build_states(read("locomo10.json"), backbone="smollm2", saes="runs/sae")
    ```

    Args:
        corpus: from `read`, or a file or folder, or several.
        backbone: model whose hidden states the SAEs read.
        saes: folder of trained SAEs; None: small ones are trained first, and cached.
        llm: what writes cues, strategies and summaries; None: offline rules.
        levels: x0 alone costs no SAE forward and no summary; x0 and x1 no summary. Also by split: {"test": "x0"}, the
            others all three.
        out: states folder to write; None: one in the cache.
        settings: other fields of `BuildStatesConfig`, for example `limit` or `perception`.

    Raises:
        As `build`.
    """
    if unknown := sorted(settings.keys() - {entry.name for entry in fields(BuildStatesConfig)}):
        raise ConfigError(f"build_states has no setting {unknown[0]}")
    paths = [] if isinstance(corpus, Corpus) else [str(corpus)] if isinstance(corpus, str | Path) else list(corpus)
    if isinstance(llm, LLMConfig):
        settings["llm"] = llm
    cfg = BuildStatesConfig(
        input=paths,
        out=None if out is None else str(out),
        backbone=backbone,
        sae=None if saes is None else str(saes),
        levels=levels,
        **settings,
    )
    own = corpus if isinstance(corpus, Corpus) else None
    return load_states(build(cfg, own, None if isinstance(llm, LLMConfig) else llm))


def build(cfg: BuildStatesConfig, corpus: Corpus | None = None, llm: AuxiliaryLLM | None = None) -> Path:
    """Read, build and write; prints what dangles and the evidence recall of x0 by category.

    Args:
        corpus: in place of the input files. llm: in place of the endpoints; both need a single process.

    Returns:
        The states folder; in a dry run the file of the prompts. Where other shards have yet to end, it is unfinished.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used, or that changes meanwhile.
        ConfigError: the output exists and is of another build, or the corpus has no questions.
        ModelError: backbone and SAEs do not fit, or too much of what the LLM was asked for failed.
        OSError: no room, or no right to write.
    """
    if cfg.workers != 1 and (corpus is not None or llm is not None):
        raise ConfigError("workers: a corpus or an LLM in memory cannot be given to other processes; take 1")
    encoder = SentenceEncoder(device=device_of(cfg.device, int(os.environ.get("LOCAL_RANK", "0"))), load=False)
    asked = llm or open_llm(cfg.llm, encoder)
    chat = asked if isinstance(asked, ChatLLM) else None
    if cfg.llm.dry_run is not None:
        return _dry_run(cfg, corpus, encoder, chat)
    out = None if cfg.out is None else Path(cfg.out)
    begun = out is None or not out.exists() or (out / MANIFEST).exists() or (out / _UNFINISHED).exists()
    if out is not None and not begun and any(out.iterdir()):
        raise ConfigError(f"{out} exists and holds no states; choose another out")
    plan = outline(cfg, corpus)
    size, saes, levels = size_of(cfg.backbone), None, plan.levels(cfg)
    if "x1" in levels and cfg.summary == "llm":
        cache = Path(cfg.cache).expanduser()
        with locked(cache / "sae.lock"):  # trained now if none are given
            saes = folder_of_saes(cfg.sae, (), cfg.backbone, cfg.cache, cfg.device, cfg.dtype)
        if cfg.backbone != "nano-untrained" and model_folder(cfg.backbone) is None:
            # a model of the hub is known by its files, so they are fetched first
            load_backbone(cfg.backbone, dtype=cfg.dtype)
        check_saes(size, *load_saes(saes), cfg.grounding, saes)
    cfg = with_cap(cfg, size)
    made = made_from(cfg, corpus, plan, asked.name, saes)
    out = out or Path(cfg.cache).expanduser() / "states" / made["build"][:32]
    with _claimed(out, cfg, made["build"]) as unfinished:
        if unfinished is None:
            print(f"states: {out} (unchanged: built before from the same input with the same settings)")
            return out
        builder = DialogueBuilder(cfg, levels, saes, out, unfinished, encoder, asked)
        left = _build_missing(cfg, corpus, plan, builder)
        if left:
            print(f"shard {cfg.shard} is done; {left} of {len(plan.turns)} dialogues belong to others, not built yet")
            return out
        with locked(unfinished / "finish.lock"):
            if not (out / CARD).exists():
                _finish(cfg, plan, chat, made, out, unfinished)
    return out


def with_cap(cfg: BuildStatesConfig, size: Backbone | BackboneSize) -> BuildStatesConfig:
    """The settings with a `max_context_tokens` where there is none and the backbone is to read all of x0 at once."""
    retrieve, codes = cfg.perception.retrieve, cfg.grounding.context_codes
    joint = size.causal if codes == "auto" else codes == "joint"
    if retrieve.max_context_tokens is not None or not joint:
        return cfg
    cap = max(1, int(_DIALOGUE_SHARE * size.max_length))
    return replace(cfg, perception=replace(cfg.perception, retrieve=replace(retrieve, max_context_tokens=cap)))


# a dialogue


@dataclass
class DialogueBuilder:
    """Builds dialogues one after the other. Models are loaded by the first dialogue that needs them.

    Attributes:
        levels: that any question of the corpus gets.
        saes: folder of the SAEs; None: no marks in x1.
        out: the states folder. unfinished: where accounts of dialogues are written.
        encoder: of texts; its device is that of this process. llm: of the settings, with the same encoder.
    """

    cfg: BuildStatesConfig
    levels: Sequence[str]
    saes: Path | None
    out: Path
    unfinished: Path
    encoder: SentenceEncoder
    llm: AuxiliaryLLM

    def __post_init__(self) -> None:
        self.cache = Path(self.cfg.cache).expanduser()
        self.perception = Perception(self.cfg.perception, self.encoder, self.llm, self.cache / "index")

    @cached_property
    def grounder(self) -> Grounder:
        """Loads backbone and SAEs; its codes are kept in the cache."""
        assert self.saes is not None
        backbone = load_backbone(self.cfg.backbone, dtype=self.cfg.dtype, device=self.encoder.device)
        folder = self.cfg.grounding.codes_folder or str(self.cache / "codes")
        return Grounder(backbone, *load_saes(self.saes), replace(self.cfg.grounding, codes_folder=folder), self.encoder)

    def build(self, task: Task) -> None:
        """Write a dialogue's states into the folder, and then its account.

        Raises:
            DataError, ModelError: as the stages do; there is no account then.
        """
        # what was encoded before must not show in the last bits of what is encoded now
        self.encoder.forget()
        factual = self.perception.perceive(task.dialogue, task.questions, task.abstention)
        splits = [task.splits[state.question.id] for state in factual]
        levels = [self.cfg.levels_of(split) for split in splits]
        ground = self.grounder.ground if self.saes else partial(AttentionalState, blocks=())
        attentional = {n: ground(factual[n]) for n, built in enumerate(levels) if "x1" in built}
        asked = [n for n, built in enumerate(levels) if "x2" in built]
        reflect = quote_evidence if self.cfg.summary == "evidence" else partial(summarise, self.llm)
        reflective = dict(zip(asked, reflect([attentional[n] for n in asked]), strict=True))
        states: list[State] = [reflective.get(n) or attentional.get(n) or base for n, base in enumerate(factual)]
        records = [record_of(state, split) for state, split in zip(states, splits, strict=True)]
        write_part(self.out, records, self.levels)
        account = {
            "turns": len(task.dialogue.turns),
            "segments": len(self.perception.index(task.dialogue).segments),
            "questions": [facts_of(record, base.capped) for record, base in zip(records, factual, strict=True)],
            "report": self.llm.take() if isinstance(self.llm, ChatLLM) else None,
        }
        write_json(self.unfinished / _ACCOUNT.format(task.number), account)
        give_back_memory()


def facts_of(record: StateRecord, capped: bool = False) -> dict[str, Any]:
    """What the summary of a build needs to know of a question, as JSON."""
    share = evidence_share(record)
    return {
        "split": record.split,
        "kind": record.kind,
        "as_gold": record.kind == (record.dimension or FACTUAL),
        "category": record.dimension or (f"category {record.category}" if record.category else "no category"),
        "without_answer": record.target is None,
        "without_marks": record.x1 != ABSENT and not record.x1.markers,
        "capped": capped,
        "recall": None if share is None else [share, marked_share(record)],
    }


def recall_of(facts: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Mean evidence recall of x0 over questions with gold evidence, and of x1's blocks over those of them that have
    x1, by category, then "all"."""
    known = [fact for fact in facts if fact["recall"] is not None]
    table: dict[str, dict[str, Any]] = {}
    for key in (*sorted({fact["category"] for fact in known}), "all"):
        shares = [fact["recall"] for fact in known if key in (fact["category"], "all")]
        marked = [share for _, share in shares if share is not None]
        held = sum(share for share, _ in shares) / len(shares) if shares else None
        table[key] = {"n": len(shares), "x0": held, "marked": sum(marked) / len(marked) if marked else None}
    return table if known else {}


# all dialogues


@contextmanager
def _claimed(out: Path, cfg: BuildStatesConfig, stamp: str) -> Iterator[Path | None]:
    """The folder of what is unfinished, which this process (of its shard) alone works in; None: there is nothing to do.

    Raises:
        ConfigError: another process is at work there, or the folder is of another build.
        FormatError: states of another format version.
    """
    unfinished = out / _UNFINISHED
    shard = shard_of(cfg.shard)
    if cfg.overwrite and shard.count > 1:
        raise ConfigError("overwrite does not work with shards; remove the folder first")
    if cfg.overwrite and out.exists():
        shutil.rmtree(out)
    if (out / MANIFEST).exists() and ((out / CARD).exists() or not unfinished.exists()):
        if read_manifest(out).get("build") != stamp:
            raise ConfigError(f"{out} exists, built from other input or settings; choose another out or set overwrite")
        yield None
        return
    new, lock = not out.exists(), unfinished / f"{shard.index}.lock"
    with locked(lock, wait=False, place=out):
        mark = unfinished / "build.json"
        if not mark.exists():
            write_json(mark, {"build": stamp})
        if read_json(mark)["build"] != stamp:
            raise ConfigError(
                f"{out} holds an unfinished build of other input or settings; choose another out or set overwrite"
            )
        try:
            yield unfinished
        finally:
            # of a build that ended before its first dialogue nothing is left behind
            if new and {*unfinished.glob("*")} == {lock, mark} and not any(out.glob("*.parquet")):
                shutil.rmtree(out)


def _build_missing(cfg: BuildStatesConfig, corpus: Corpus | None, plan: Outline, builder: DialogueBuilder) -> int:
    """Build what is missing of this shard; the number of dialogues of other shards that are missing then."""
    shard, chat = shard_of(cfg.shard), builder.llm if isinstance(builder.llm, ChatLLM) else None
    accounts = [builder.unfinished / _ACCOUNT.format(number) for number in range(len(plan.turns))]
    own = {number: turns for number, turns in enumerate(plan.turns.values()) if shard.holds(number)}
    written = {number: read_json(accounts[number]) for number in own if accounts[number].exists()}
    # a dialogue with something in it that the LLM failed to write is built anew
    done = {n: own[n] for n, account in written.items() if not (account["report"] or {}).get("failures")}
    missing = (task for task in tasks(cfg, plan, corpus) if task.number in own.keys() - done.keys())
    with ProgressBar("states", sum(own.values()), sum(done.values()), percent=True) as bar:
        for count, task in enumerate(_built(cfg, builder, missing), start=len(done) + 1):
            if chat is not None:
                chat.merge(read_json(accounts[task.number])["report"])
                chat.check(cfg.max_failed, done=False)
            bar.step(own[task.number], f"{count} of {len(own)} dialogues")
    return sum(not account.exists() for account in accounts)


def _built(cfg: BuildStatesConfig, builder: DialogueBuilder, missing: Iterator[Task]) -> Iterator[Task]:
    """Build dialogues, here or in worker processes, and yield each when it is done."""
    workers = cfg.workers or cores()
    if workers == 1:
        for task in missing:
            builder.build(task)
            yield task
        return
    given = (max(1, cores() // workers), cfg, builder.levels, builder.saes, builder.out, builder.unfinished)
    with spawned_pool(workers, _start, given) as pool:
        under_way: dict[Future[None], Task] = {}
        try:
            for task in missing:
                under_way[pool.submit(_build, task)] = task
                # one being built and one on its way for each process, so that memory stays flat
                while len(under_way) >= 2 * workers:
                    yield from _finished(under_way)
            while under_way:
                yield from _finished(under_way)
        except BrokenProcessPool:
            what = "a worker process died, perhaps for want of memory; take fewer workers. What is built stays"
            raise ModelError(f"{what}: start it again") from None


def _finished(under_way: dict[Future[None], Task]) -> Iterator[Task]:
    for future in wait(under_way, return_when=FIRST_COMPLETED).done:
        task = under_way.pop(future)
        future.result()
        yield task


_builder: DialogueBuilder | None = None


def _start(
    threads: int, cfg: BuildStatesConfig, levels: Sequence[str], saes: Path | None, out: Path, unfinished: Path
) -> None:
    """In a new process."""
    global _builder
    os.environ["REMIND_QUIET"] = "1"
    import torch

    torch.set_num_threads(threads)
    number = (current_process()._identity or (1,))[0] - 1
    encoder = SentenceEncoder(device=device_of(cfg.device, number), load=False)
    _builder = DialogueBuilder(cfg, levels, saes, out, unfinished, encoder, open_llm(cfg.llm, encoder))


def _build(task: Task) -> None:
    assert _builder is not None
    _builder.build(task)


def _finish(
    cfg: BuildStatesConfig, plan: Outline, chat: ChatLLM | None, made: Mapping[str, Any], out: Path, unfinished: Path
) -> None:
    """Manifest and card from the accounts of all dialogues; equal for equal builds, however they were distributed."""
    accounts = [read_json(unfinished / _ACCOUNT.format(number)) for number in range(len(plan.turns))]
    facts: list[dict[str, Any]] = [fact for account in accounts for fact in account["questions"]]
    if chat is not None:
        chat.take()
        for account in accounts:
            chat.merge(account["report"])
        chat.check(cfg.max_failed)
    kinds = Counter(fact["kind"] for fact in facts if fact["kind"])
    as_gold = Counter(fact["kind"] for fact in facts if fact["kind"] and fact["as_gold"])
    counts = {name: sum(fact[name] for fact in facts) for name in ("without_answer", "without_marks", "capped")}
    sizes = {name: sum(account[name] for account in accounts) for name in ("turns", "segments")}
    counts = {"dialogues": len(accounts), "questions": len(facts), **sizes, **counts}
    manifest = {
        **made,
        "llm_report": None if chat is None else chat.report(),
        "kinds": {name: {"n": n, "as_gold": as_gold[name]} for name, n in sorted(kinds.items())},
        "counts": {**counts, "evidence_references": plan.references, "evidence_dangling": len(plan.dangling)},
        "overlap": None if plan.overlap is None else asdict(plan.overlap),
        "evidence_recall": recall_of(facts),
        "dangling": [asdict(item) for item in plan.dangling],
    }
    finish(out, manifest)
    shutil.rmtree(unfinished, ignore_errors=True)
    print(_summary(manifest, Counter(fact["split"] for fact in facts), plan, cfg))
    if chat is not None:
        print(chat.report_text())
    print(f"states: {out}")


def _summary(manifest: Mapping[str, Any], splits: Mapping[str, int], plan: Outline, cfg: BuildStatesConfig) -> str:
    """The counts and the evidence recall of a build as text."""
    counts, kinds = manifest["counts"], manifest["kinds"]
    shown = ", ".join(f"{splits[name]} {name}" for name in ("train", "dev", "test") if splits.get(name))
    lines = [
        f"{counts['questions']} questions over {counts['dialogues']} dialogues ({shown})",
        f"{counts['turns']} turns in {counts['segments']} segments, {counts['turns'] / counts['segments']:.1f} each",
        f"{counts['without_answer']} questions have no gold answer",
    ]
    if "x1" in plan.levels(cfg):
        lines.append(f"{counts['without_marks']} questions have no marked turn: their x1 is x0")
    if (cap := cfg.perception.retrieve.max_context_tokens) is not None:
        cut = counts["capped"]
        lines.append(f"the cap of {cap} tokens left out segments of {cut} questions that top_share would keep")
    if kinds:
        each = ", ".join(f"{row['n']} {name.replace('_', ' ')}" for name, row in kinds.items())
        same = sum(row["as_gold"] for row in kinds.values())
        lines.append(f"kinds inferred: {each}; {same} are those of the benchmark")
    lines.append(f"{len(plan.dangling)} of {plan.references} evidence references name no turn and are left out")
    lines += [f"  {item.question_id}: {item.reference!r}" for item in plan.dangling[:5]]
    if len(plan.dangling) > 5:
        lines.append("  … the rest is listed in manifest.json")
    if plan.overlap is not None:
        lines.append(f"overlap: {plan.overlap}")
    if table := manifest["evidence_recall"]:
        lines.append(f"{'evidence recall':<34}{'n':>6}{'x0':>8}{'marked':>8}")
        for key, row in table.items():
            marked = "-" if row["marked"] is None else f"{row['marked']:.3f}"
            lines.append(f"{key:<34}{row['n']:>6}{row['x0']:>8.3f}{marked:>8}")
    return "\n".join(lines)


def _dry_run(cfg: BuildStatesConfig, corpus: Corpus | None, encoder: SentenceEncoder, chat: ChatLLM | None) -> Path:
    """Note all that building would ask, summaries without marked blocks; print the costs."""
    if chat is None or chat.dry is None:
        raise ConfigError("a dry run needs llm.default or another endpoint; the offline fallback sends no requests")
    # the cap decides which segments a summary would be asked about
    cfg = with_cap(cfg, size_of(cfg.backbone))
    perception = Perception(cfg.perception, encoder, chat)
    for task in tasks(cfg, outline(cfg, corpus), corpus):
        states = perception.perceive(task.dialogue, task.questions, task.abstention)
        asked = [
            state for state in states if cfg.summary == "llm" and "x2" in cfg.levels_of(task.splits[state.question.id])
        ]
        chat.summaries([AttentionalState(state, ()) for state in asked])
    print(chat.dry.report())
    return chat.dry.path
