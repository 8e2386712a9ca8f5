"""What is built, by which process, and what decides it: the corpus in outline, shards, and a hash of all inputs."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from remind.build.config import BuildStatesConfig
from remind.core.errors import ConfigError
from remind.core.files import input_hashes, sha256_file, sha256_json
from remind.core.processes import WHOLE, Shard
from remind.data.dialogue import Corpus, Dangling, Dialogue, Question, note_ids
from remind.data.readers import mapping_files, stream
from remind.data.split import Overlap, assign_splits, check_overlap
from remind.models.images import ImageFiles
from remind.states import prompts
from remind.states.dataset import FORMAT_VERSION

#: Of the states that a build makes of the same input: raised when they change.
_VERSION = 1
#: Fields that say where files are and how the work is distributed; they do not change the result.
_ELSEWHERE = ("input", "out", "cache", "overwrite", "workers", "shard")
#: The same of grounding.
_ELSEWHERE_IN_GROUNDING = ("codes_folder", "image_root")


# the corpus


class Task(NamedTuple):
    """A dialogue and what is asked about it.

    Attributes:
        number: from 0.
        splits: question id to split.
        abstention: as in `FactualState`.
    """

    number: int
    dialogue: Dialogue
    questions: list[Question]
    splits: dict[str, str]
    abstention: bool


@dataclass
class Outline:
    """What is kept of a corpus of any size: a few hundred bytes a question.

    Attributes:
        questions: without text, options and answers.
        turns: number of turns of each dialogue that is built, by its id.
        splits: question id to split.
        overlap: gold evidence that training and test questions share.
        references, dangling: as in `Corpus`, of the questions that are built.
        abstention: whether prompts say what to answer where the conversation does not tell; see `BuildStatesConfig`.
    """

    questions: list[Question] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    splits: Mapping[str, str] = field(default_factory=dict)
    overlap: Overlap | None = None
    references: int = 0
    dangling: list[Dangling] = field(default_factory=list)
    abstention: bool = False

    def levels(self, cfg: BuildStatesConfig) -> tuple[str, ...]:
        """Those that any question gets."""
        return max(map(cfg.levels_of, {*self.splits.values()}), key=len)


def outline(cfg: BuildStatesConfig, corpus: Corpus | None = None) -> Outline:
    """Read everything once, since splits need all of it; it is never held.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used, ids that stand twice, evidence on both
            sides of a split that is not only to be reported. Names the path it came by.
        ConfigError: no questions.
    """
    # questions of one's own may well be such that the dialogue does not tell
    plan = Outline(abstention=cfg.ask is not None)
    first: dict[tuple[str, str], str | Path] = {}
    built, referenced = set[str](), dict[str, int]()
    for path, piece in _pieces(cfg, corpus):
        note_ids(piece, path, first)
        plan.abstention |= any(question.unanswerable for question in piece.questions)
        plan.questions += [replace(question, text="", options=(), answers=()) for question in piece.questions]
        for dialogue, questions in piece.by_dialogue():
            if questions:
                plan.turns[dialogue.id] = len(dialogue.turns)
                built |= {question.id for question in questions[: cfg.limit]}
        referenced |= piece.referenced
        plan.dangling += piece.dangling
    if cfg.dialogues is not None:
        chosen = _few(plan.questions, cfg.dialogues)
        plan.questions = [question for question in plan.questions if question.dialogue_id in chosen]
        plan.turns = {name: count for name, count in plan.turns.items() if name in chosen}
        built &= {question.id for question in plan.questions}
    plan.references = sum(count for name, count in referenced.items() if name in built)
    plan.dangling = [item for item in plan.dangling if item.question_id in built]
    if not plan.questions:
        raise ConfigError(f"{', '.join(paths_of(cfg.input))}: holds dialogues but no questions; give some with --ask")
    if cfg.abstention is not None:
        plan.abstention = cfg.abstention
    plan.splits = assign_splits(plan.questions, cfg.split)
    plan.overlap = check_overlap(
        ((q.id, q.dialogue_id, plan.splits[q.id], (*q.evidence, *q.images)) for q in plan.questions),
        lambda dialogue_id: first["dialogue", dialogue_id],
        cfg.split.overlap == "report",
    )
    return plan


def _few(questions: Sequence[Question], count: int) -> list[str]:
    """The ids of `count` dialogues: of every split that the questions bring the first one, then the second, ..."""
    places: dict[str, tuple[int, int]] = {}
    taken: Counter[str | None] = Counter()
    for question in questions:
        if question.dialogue_id not in places:
            order = ("train", "test", "dev", None).index(question.split)
            places[question.dialogue_id] = (taken[question.split], order)
            taken[question.split] += 1
    return sorted(places, key=places.__getitem__)[:count]


def tasks(cfg: BuildStatesConfig, plan: Outline, corpus: Corpus | None = None) -> Iterator[Task]:
    """Read everything again, one dialogue in memory at a time."""
    number = 0
    for _, piece in _pieces(cfg, corpus):
        for dialogue, questions in piece.by_dialogue():
            wanted = cfg.dialogues is None or dialogue.id in plan.turns
            chosen = questions[: cfg.limit] if wanted else []
            if chosen:
                splits = {question.id: plan.splits[question.id] for question in chosen}
                yield Task(number, dialogue, chosen, splits, plan.abstention)
                number += 1


def _pieces(cfg: BuildStatesConfig, corpus: Corpus | None) -> Iterator[tuple[str, Corpus]]:
    read = ((path, piece) for path in paths_of(cfg.input) for piece in stream(path, cfg.format, cfg.images))
    for path, piece in read if corpus is None else [("", corpus)]:
        yield path, piece if cfg.ask is None else asked(piece, cfg.ask)


def paths_of(given: str | Sequence[str]) -> list[str]:
    """A setting that names a path, or several."""
    return [given] if isinstance(given, str) else list(given)


def asked(corpus: Corpus, texts: Sequence[str]) -> Corpus:
    """The dialogues, each with the same questions, which nobody has answered."""
    return Corpus(
        corpus.dialogues,
        tuple(
            Question(f"{dialogue.id}-ask{number}", dialogue.id, text.strip(), split="test")
            for dialogue in corpus.dialogues
            for number, text in enumerate(texts, start=1)
        ),
    )


# what decides the states


def content_of(cfg: BuildStatesConfig, corpus: Corpus | None) -> dict[str, str]:
    """Hashes of the input files and of the mapping file they are read by; of a corpus in memory its own."""
    if corpus is not None:
        said = [[dialogue.id, [asdict(session) for session in dialogue.sessions]] for dialogue in corpus.dialogues]
        return {"corpus": sha256_json([said, [asdict(question) for question in corpus.questions]])}
    return input_hashes([*paths_of(cfg.input), *mapping_files(cfg.format)])


def made_from(
    cfg: BuildStatesConfig, corpus: Corpus | None, plan: Outline, llm: str, saes: Path | None
) -> dict[str, Any]:
    """All that decides the finished folder, for its manifest; `build` is the hash of it.

    Args:
        llm: name of the auxiliary LLM, however it is reached. saes: folder of the SAEs; None: no x1.

    Raises:
        ImagePathError: an image that grounding is to show as pixels, missing or outside of the root.
    """
    from sae.published import file_hashes

    settings = {key: value for key, value in asdict(cfg).items() if key not in _ELSEWHERE}
    chat = llm.startswith("chat-")  # only a chat model is asked anything
    inputs, hashes = content_of(cfg, corpus), {} if saes is None else file_hashes(saes)
    templates = {name: prompts.fingerprint(name) for name in (*prompts.RENDERED, *(prompts.ASKED if chat else ()))}

    decisive = {key: value for key, value in settings.items() if key not in ("llm", "sae")}
    decisive["grounding"] = {k: v for k, v in settings["grounding"].items() if k not in _ELSEWHERE_IN_GROUNDING}
    decisive["device"] = cfg.device.partition(":")[0]
    pictures: list[Any] = []
    dialogues = (task.dialogue for task in tasks(cfg, plan, corpus))
    shown = ((one.id, [image.path for image in one.images if image.path is not None]) for one in dialogues)
    if cfg.grounding.images == "pixels":
        pictures = [one for own in ImageFiles(None, cfg.grounding.image_root, "grounding.").check(shown) for one in own]
    elif cfg.images is not None:
        # more of them may have come since
        pictures = list(shown)
    about = [_VERSION, FORMAT_VERSION, decisive, inputs, model_hash(cfg.backbone), llm, hashes, templates, pictures]
    compared = {key: value for key, value in settings.items() if key not in ("llm", "max_failed", "levels")}
    return {
        "build": sha256_json([*about, versions()]),
        "inputs": inputs,
        "config": {"input": cfg.input, **settings},
        "config_hash": sha256_json({**compared, "llm": llm} if chat else compared),
        "prompts": templates,
        "llm": llm,
        "abstention": plan.abstention,
        "kind": cfg.perception.kind,
        "grounding_tokenizer": cfg.backbone,
        "sae": hashes,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    names = ("torch", "transformers", "sentence-transformers", "remind-toolkit")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def model_hash(name: str) -> str:
    """Hash of a model's files, whatever it is called.

    Raises:
        ModelError: no such model.
    """
    from remind.models.backbone import model_folder

    folder = model_folder(name)
    if folder is None:
        return name
    kinds = (".safetensors", ".json", ".txt", ".model", ".jinja")
    files = sorted(file for file in folder.iterdir() if file.suffix in kinds and file.is_file())
    return sha256_json({file.name: sha256_file(file) for file in files})


# which part of them a process builds


def shard_of(text: str | None, environment: Mapping[str, str] | None = None) -> Shard:
    """The shard of this process.

    Args:
        text: `i/n` counted from 1; auto: from accelerate launch or torchrun, else everything; None: everything.

    Raises:
        ConfigError: none of these, or i outside 1 to n.
    """
    environment = os.environ if environment is None else environment
    if text is None:
        return WHOLE
    if text == "auto":
        return Shard(int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1)))
    first, _, last = text.partition("/")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise ConfigError(f"shard is i/n with i from 1 to n, or auto, not {text!r}")
    return Shard(int(first) - 1, int(last))
