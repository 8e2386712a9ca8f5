"""From a dialogue file to states on disk: read, perceive (x0), ground (x1), reflect (x2), render, write."""

from __future__ import annotations

import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind import prompts
from remind.abstraction import summarise_all
from remind.dialogue import Corpus
from remind.errors import ConfigError
from remind.grounding import GroundingConfig
from remind.io import atomic_folder, sha256_file, sha256_json
from remind.llm.endpoints import LLMConfig
from remind.perception import PerceptionConfig
from remind.progress import track
from remind.pyramid import AttentionalState, ReflectiveState, line_of, render, render_target
from remind.readers import read
from remind.split import SplitConfig, assign_splits, check_overlap
from remind.states import Picture, StateRecord, evidence_share, write_manifest, write_part

if TYPE_CHECKING:
    from remind.grounding import Grounder
    from remind.llm.auxiliary import ChatLLM
    from remind.perception import Perception


@dataclass
class BuildStatesConfig:
    """Build x0, x1 and x2 for every question of a corpus."""

    input: str | list[str]
    """File or folder of dialogues with questions; a list of several is merged."""
    out: str
    """Folder for the states (part-*.parquet and manifest.json). Must not exist unless overwrite is set."""
    format: str | None = None
    """Format of the input; None: recognised from the content."""
    backbone: str = "minilm"
    """Model whose hidden states the SAEs read: minilm, nano, or a Hugging Face folder or id."""
    sae: str | None = None
    """Folder of trained SAEs (from train_sae.py). None: a small one is trained on sae_data first, and cached."""
    sae_data: str | list[str] | None = None
    """Dialogues to train that small SAE on; they should share nothing with the input. None: synthetic small talk."""
    perception: PerceptionConfig = field(default_factory=PerceptionConfig)
    """Segments, cues, retrieval (Section 4.2)."""
    grounding: GroundingConfig = field(default_factory=GroundingConfig)
    """Guidance, resonance, selection (Section 4.3)."""
    llm: LLMConfig = field(default_factory=LLMConfig)
    """Who writes cues, strategies and summaries: chat models, or the offline stand-in for those without an endpoint."""
    max_failed: float = 0.1
    """Share of a stage's requests that may fail, each then written by the stand-in; beyond it nothing is built."""
    split: SplitConfig = field(default_factory=SplitConfig)
    """Train, dev and test."""
    limit: int | None = None
    """At most this many questions per dialogue, the first ones; for a quick look."""
    cache: str = "~/.cache/remind"
    """Folder for dialogue indexes and for SAEs trained on the way; safe to delete."""
    device: str = "cpu"
    """Device of backbone, SAEs and text encoder."""
    dtype: str = "float32"
    """Precision of the backbone."""
    overwrite: bool = False
    """Replace an existing states folder."""

    def __post_init__(self) -> None:
        if not 0 <= self.max_failed <= 1:
            raise ConfigError(f"max_failed is a share from 0 to 1, not {self.max_failed}")


def record_of(state: ReflectiveState, split: str) -> StateRecord:
    """The states of one question, rendered, with everything training and evaluation need to know of it."""
    attentional = state.attentional
    factual = attentional.factual
    question, dialogue = factual.question, factual.dialogue
    held = {turn.id for turn in factual.turns}
    held_images = {image.index for turn in factual.turns for image in turn.images}
    return StateRecord(
        question_id=question.id,
        dialogue_id=dialogue.id,
        split=split,
        format=question.format,
        question=question.text,
        options=question.options,
        answers=question.answers,
        dimension=question.dimension,
        category=None if question.category is None else str(question.category),
        visual=question.visual,
        evidence=question.evidence,
        evidence_lines=tuple(line_of(dialogue.turn(turn_id)) for turn_id in question.evidence),
        evidence_found=tuple(turn_id for turn_id in question.evidence if turn_id in held),
        images=question.images,
        images_found=tuple(index for index in question.images if index in held_images),
        target=render_target(factual).text,
        x0=render(factual),
        x1=render(attentional),
        x2=render(state),
        salience=attentional.salience,
        pictures=tuple(
            Picture(turn.id, place, image.path)
            for turn in factual.turns
            for place, image in enumerate(turn.images)
            if image.path is not None
        ),
    )


class Tally:
    """Counts and evidence recall over records that need not be kept."""

    def __init__(self) -> None:
        self.questions = self.without_answer = 0
        self.splits: Counter[str] = Counter()
        self.dialogues: set[str] = set()
        self._shares: dict[str, list[tuple[float, float]]] = defaultdict(list)

    def add(self, record: StateRecord) -> None:
        self.questions += 1
        self.without_answer += record.target is None
        self.splits[record.split] += 1
        self.dialogues.add(record.dialogue_id)
        share = evidence_share(record)
        if share is not None:
            kind = record.dimension or (f"category {record.category}" if record.category else "no category")
            for key in ("all", kind):
                self._shares[key].append((share, _marked_share(record)))

    def recall(self) -> dict[str, dict[str, float | int]]:
        """Mean evidence recall of x0 and of x1's blocks over questions with gold evidence, by category, then "all"."""
        return {
            key: {
                "n": len(pairs),
                "x0": sum(held for held, _ in pairs) / len(pairs),
                "marked": sum(marked for _, marked in pairs) / len(pairs),
            }
            for key, pairs in sorted(self._shares.items(), key=lambda item: (item[0] == "all", item[0]))
        }


def _marked_share(record: StateRecord) -> float:
    """Share of the gold evidence that stands inside x1's blocks."""
    pairs = list(zip(record.x1.markers[::2], record.x1.markers[1::2], strict=True))
    marked = [turn for turn in record.x1.turns if any(o[1] <= turn.start and turn.end <= c[0] for o, c in pairs)]
    if record.visual:
        shown = "".join(record.x1.text[turn.start : turn.end] for turn in marked)
        return sum(f"[Image #{index} Caption]" in shown for index in set(record.images)) / len(set(record.images))
    ids = {turn.turn_id for turn in marked}
    return len(ids & set(record.evidence)) / len(set(record.evidence))


def build(
    corpus: Corpus, splits: dict[str, str], perception: Perception, grounder: Grounder, limit: int | None = None
) -> Iterator[list[StateRecord]]:
    """The records of each dialogue's questions, one dialogue in memory at a time.

    What the LLM writes is asked for by dialogue: cues, then all strategies, then all summaries.
    """
    for dialogue, questions in corpus.by_dialogue():
        if chosen := questions[:limit]:
            states = perception.perceive_all(dialogue, chosen)
            grounded = [grounder.ground(state) for state in track(states, f"states {dialogue.id}", len(states))]
            made = summarise_all(perception.llm, grounded)
            yield [record_of(state, splits[q.id]) for q, state in zip(chosen, made, strict=True)]


def dry_run(corpus: Corpus, perception: Perception, llm: ChatLLM, limit: int | None = None) -> Path:
    """Note all that building would ask, summaries without marked blocks; print the costs; return the prompts' file."""
    assert llm.dry is not None
    for dialogue, questions in corpus.by_dialogue():
        if chosen := questions[:limit]:
            states = perception.perceive_all(dialogue, chosen)
            llm.summaries([AttentionalState(state, ()) for state in states])
    print(llm.dry.report())
    return llm.dry.path


def _paths(value: str | list[str] | None) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def input_hashes(paths: Iterable[str | Path]) -> dict[str, str]:
    """SHA-256 of every input file, by name."""
    files = [
        f for path in map(Path, paths) for f in (sorted(path.rglob("*")) if path.is_dir() else [path]) if f.is_file()
    ]
    return {file.name: sha256_file(file) for file in files}


def build_states(cfg: BuildStatesConfig) -> Path:
    """Read, build and write; prints what dangles and the evidence recall of x0 by category.

    Returns:
        The states folder; in a dry run the file of the prompts.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used.
        ConfigError: the output exists, or the corpus has no questions.
        ModelError: backbone and SAEs do not fit, or too much of what the LLM was asked for failed.
    """
    from remind.backbone import load_backbone
    from remind.grounding import Grounder
    from remind.grounding.load import folder_of_saes, load_saes
    from remind.llm.auxiliary import ChatLLM, open_llm
    from remind.perception import Perception
    from remind.perception.encode import SentenceEncoder

    out = Path(cfg.out)
    if out.exists() and not cfg.overwrite and cfg.llm.dry_run is None:
        raise ConfigError(f"{out} exists; choose another out or set overwrite")
    corpus = Corpus.merge([read(path, cfg.format) for path in _paths(cfg.input)])
    if not corpus.questions:
        raise ConfigError(f"{cfg.input} holds dialogues but no questions; states are built for questions")
    splits = assign_splits(corpus, cfg.split)
    check_overlap((q.id, q.dialogue_id, splits[q.id], (*q.evidence, *q.images)) for q in corpus.questions)

    encoder = SentenceEncoder(device=cfg.device)
    llm = open_llm(cfg.llm, encoder)
    chat = llm if isinstance(llm, ChatLLM) else None
    if cfg.llm.dry_run is not None:
        if chat is None:
            raise ConfigError("a dry run needs llm.default or another endpoint; the offline stand-in asks nothing")
        return dry_run(corpus, Perception(cfg.perception, encoder, chat), chat, cfg.limit)
    sae_folder = folder_of_saes(cfg.sae, _paths(cfg.sae_data), cfg.backbone, cfg.cache, cfg.device, cfg.dtype)
    saes, idf = load_saes(sae_folder)
    backbone = load_backbone(cfg.backbone, dtype=cfg.dtype, device=cfg.device)
    perception = Perception(cfg.perception, encoder, llm, Path(cfg.cache).expanduser() / "index")
    grounder = Grounder(backbone, saes, idf, cfg.grounding, encoder)

    tally = Tally()
    with atomic_folder(out) as folder:
        for number, part in enumerate(build(corpus, splits, perception, grounder, cfg.limit)):
            write_part(folder, number, part)
            for record in part:
                tally.add(record)
            if chat is not None:
                chat.check(cfg.max_failed, done=False)
        if chat is not None:
            chat.check(cfg.max_failed)
        counts = {
            "dialogues": len(tally.dialogues),
            "questions": tally.questions,
            "without_answer": tally.without_answer,
            "evidence_references": corpus.references,
            "evidence_dangling": len(corpus.dangling),
        }
        write_manifest(folder, _manifest(cfg, counts, tally.recall(), corpus, chat or llm.name, sae_folder))
    _report(tally, corpus)
    if chat is not None:
        print(chat.told())
    print(f"states: {out}")
    return out


def _manifest(
    cfg: BuildStatesConfig, counts: dict[str, int], table: Any, corpus: Corpus, llm: ChatLLM | str, sae_folder: Path
) -> dict[str, Any]:
    config = asdict(cfg)
    name, report = (llm, None) if isinstance(llm, str) else (llm.name, llm.report())
    # who wrote is told by the name, however it was reached
    told = {k: v for k, v in config.items() if k not in ("out", "cache", "overwrite", "input", "llm", "max_failed")}
    return {
        "inputs": input_hashes(_paths(cfg.input)),
        "config": config,
        "config_hash": sha256_json(told if report is None else {**told, "llm": name}),
        "prompts": prompts.fingerprints(),
        "llm": name,
        "llm_report": report,
        "grounding_tokenizer": cfg.backbone,
        "sae": {
            file.parent.name: sha256_file(file) for file in sorted(sae_folder.glob("layer_*/sae_weights.safetensors"))
        },
        "counts": counts,
        "evidence_recall": table,
        "dangling": [asdict(item) for item in corpus.dangling],
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "remind-toolkit")},
        },
    }


def _report(tally: Tally, corpus: Corpus) -> None:
    splits = ", ".join(f"{tally.splits[name]} {name}" for name in ("train", "dev", "test") if tally.splits[name])
    print(f"{tally.questions} questions over {len(tally.dialogues)} dialogues ({splits})")
    print(f"{tally.without_answer} questions have no gold answer")
    print(f"{len(corpus.dangling)} of {corpus.references} evidence references name no turn and are left out")
    for item in corpus.dangling[:5]:
        print(f"  {item.question_id}: {item.reference!r}")
    if len(corpus.dangling) > 5:
        print("  … the rest is listed in manifest.json")
    if table := tally.recall():
        print(f"{'evidence recall':<34}{'n':>6}{'x0':>8}{'marked':>8}")
        for key, row in table.items():
            print(f"{key:<34}{row['n']:>6}{row['x0']:>8.3f}{row['marked']:>8.3f}")
