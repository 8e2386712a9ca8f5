"""From dialogues to a benchmark: clusters, items, filters, split; each stage runs once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, sha256_file, sha256_json, write_json, write_rows, write_text
from remind.core.run_folder import RunFolder
from remind.data.dialogue import DIMENSIONS, Corpus, Dialogue, Image
from remind.data.readers import read, write_refmem
from remind.llm.client import Chats
from remind.llm.ledger import table
from remind.refmem import generate, personal, sessions
from remind.refmem.cluster import read_clusters, text_clusters
from remind.refmem.config import STAGES, STAGES_OF, RefMemConfig
from remind.refmem.filters import BLIND_TEMPLATE, make_filtered
from remind.refmem.images import ClipEncoder, image_clusters
from remind.refmem.items import Item, anchors_missing, read_items, write_items
from remind.refmem.split import split
from remind.refmem.stages import Stage, run_stage
from remind.refmem.statistics import as_markdown, statistics
from remind.states import prompts

#: The benchmark, in the folder of the last stage.
RESULT = "refmem.jsonl"
#: What a stage depends on, and how its folder is filled.
Task = tuple[dict[str, Any], Callable[[Path], dict[str, Any]]]


def open_corpus(cfg: RefMemConfig) -> Corpus:
    """The dialogues of the input without their questions. Raises DataError for an input that cannot be used."""
    paths = [cfg.input] if isinstance(cfg.input, str) else list(cfg.input)
    dialogues = Corpus.merge([read(path, cfg.format) for path in paths], paths).dialogues[: cfg.limit]
    if not dialogues:
        raise ConfigError("the input holds no dialogues")
    return Corpus(dialogues)


def content_key(corpus: Corpus) -> str:
    """Hash of everything said and shown; images count by their bytes, not by their paths."""

    def content(dialogue: Dialogue) -> list[Any]:
        turns = [
            [turn.id, turn.speaker, turn.text, turn.time]
            + [[i.caption, i.source, None if i.path is None else sha256_file(i.path)] for i in turn.images]
            for turn in dialogue.turns
        ]
        return [dialogue.id, [[one.id, one.time, len(one.turns)] for one in dialogue.sessions], turns]

    return sha256_json([content(dialogue) for dialogue in corpus.dialogues])


class Build:
    """One build: its input, its settings and its stages.

    Attributes:
        done: the stages that `run` has finished, by name.

    Raises:
        ConfigError, ModelError: an endpoint that is missing or cannot be used; raised before any work.
    """

    def __init__(self, cfg: RefMemConfig, corpus: Corpus) -> None:
        cfg.check_endpoints()
        self.cfg, self.corpus, self.out = cfg, corpus, Path(cfg.out)
        self.chats = Chats(cfg.llm)
        self.writer, self.guesser = self.chats.stage("questions"), self.chats.stage("answer")
        self.done: dict[str, Stage] = {}

    def run(self) -> Path:
        """Run the stages that are not finished yet, up to `cfg.until`; returns the folder of that stage."""
        tasks = (self.clusters, self.items, self.filtered, self.benchmark)
        for name, task in zip(STAGES, tasks, strict=True):
            self.done[name] = run_stage(self.out / name, *task())
            if name == self.cfg.until:
                break
        return self.done[self.cfg.until].folder

    def clusters(self) -> Task:
        """Evidence clusters of segments and images."""
        cfg = self.cfg
        # files of a local CLIP folder may change; those of a hub id are taken as fixed
        weights = sorted(Path(cfg.clip).glob("*.safetensors")) if cfg.clip is not None else []
        settings = {
            "source": content_key(self.corpus),
            "segment": asdict(cfg.segment),
            "cluster": asdict(cfg.cluster),
            "image_cluster": asdict(cfg.image_cluster),
            "clip": [cfg.clip, *map(sha256_file, weights)],
            "encoder": "minilm",
        }

        def write(to: Path) -> dict[str, Any]:
            from remind.models.encoder import SentenceEncoder

            encoder = SentenceEncoder(device=cfg.device)
            clip = None if cfg.clip is None else ClipEncoder(cfg.clip, cfg.device)
            by_text, segments = text_clusters(self.corpus, encoder, cfg.segment, cfg.cluster)
            by_image, images = image_clusters(self.corpus, encoder, clip, cfg.image_cluster)
            write_rows(to / "clusters.jsonl", map(asdict, [*by_text, *by_image]))
            return {"segments": segments, "images": images, "clusters": {"text": len(by_text), "image": len(by_image)}}

        return settings, write

    def items(self) -> Task:
        """Items of every cluster, written by a chat model."""
        assert self.writer is not None
        writer, clusters = self.writer, self.done["clusters"]
        settings = {
            "clusters": clusters.key,
            "items": asdict(self.cfg.questions),
            "made_by": writer.name,
            "prompt_id": prompts.prompt_id(generate.TEMPLATE),
        }

        def write(to: Path) -> dict[str, Any]:
            items, counts = generate.write_questions(
                self.corpus, read_clusters(clusters.folder / "clusters.jsonl"), writer, self.cfg.questions
            )
            write_items(to / "items.jsonl", items)
            return {**counts, "items": len(items)}

        return settings, write

    def filtered(self) -> Task:
        """The items that pass the filters."""
        items = self.done["items"]
        settings = {
            "items": items.key,
            "filters": asdict(self.cfg.filters),
            "blind_by": None if self.guesser is None else self.guesser.name,
            "prompt_id": prompts.prompt_id(BLIND_TEMPLATE),
        }

        def write(to: Path) -> dict[str, Any]:
            drafts = read_items(items.folder / "items.jsonl")
            return make_filtered(to, drafts, self.corpus, self.cfg.filters, self.guesser)

        return settings, write

    def benchmark(self) -> Task:
        """Split, statistics and the benchmark, from the filtered or the adjudicated items."""
        cfg, filtered = self.cfg, self.done["filtered"]
        source = filtered.folder / "items.jsonl" if cfg.adjudicated is None else Path(cfg.adjudicated)
        if not source.is_file():
            raise DataError("no such file", source)
        adjudicated = None if cfg.adjudicated is None else sha256_file(source)
        settings = {"filtered": filtered.key, "adjudicated": adjudicated, "train": cfg.train, "seed": cfg.seed}

        def write(to: Path) -> dict[str, Any]:
            items = read_items(source)
            self._check_items(items, source)
            splits = split(items, self.corpus, cfg.train, cfg.seed, cfg.filters.near_duplicate)
            segments = self.done["clusters"].result["segments"]
            return write_benchmark(to, self.corpus, items, splits, segments, filtered.result)

        return settings, write

    def _check_items(self, items: Sequence[Item], path: Path) -> None:
        """Raise DataError for no items, and for items of another build."""
        if not items:
            raise DataError("no item is left; use longer dialogues or loosen clusters and filters", path)
        clusters = read_clusters(self.done["clusters"].folder / "clusters.jsonl")
        dialogue_of = {cluster.id: cluster.dialogue_id for cluster in clusters}
        for item in items:
            if dialogue_of.get(item.cluster_id) != item.dialogue_id:
                message = f"cluster {item.cluster_id!r} is not in this build; is the file from another?"
                raise DataError(message, path, item.id)
            if anchors_missing(item, self.corpus.dialogue(item.dialogue_id)):
                raise DataError("it has no evidence, or some that is not in the dialogue", path, item.id)


def write_benchmark(
    to: Path, corpus: Corpus, items: Sequence[Item], splits: dict[str, str], segments: int, filters: dict[str, Any]
) -> dict[str, Any]:
    """Write refmem.jsonl (with copies of images that have pixels), items.jsonl, statistics.json and statistics.md.

    Returns:
        The prompts of the items, and the number of items.
    """
    dialogues = tuple(_with_copies(to, number, dialogue) for number, dialogue in enumerate(corpus.dialogues))
    benchmark = Corpus(dialogues, tuple(item.as_question(splits[item.id]) for item in items))
    write_refmem(benchmark, to / RESULT)
    write_items(to / "items.jsonl", items)
    counts = statistics(benchmark, segments)
    write_json(to / "statistics.json", {**counts, "filters": filters})
    write_text(to / "statistics.md", as_markdown(counts, filters))
    return {"prompts": sorted({item.prompt_id for item in items}), "total": len(items)}


def _with_copies(to: Path, number: int, dialogue: Dialogue) -> Dialogue:
    """The dialogue with its image files copied beside the benchmark, where its reader looks for them."""

    def copied(image: Image) -> Image:
        if image.path is None:
            return image
        copy = to / "images" / str(number) / f"{image.index}{Path(image.path).suffix.lower()}"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image.path, copy)
        return replace(image, path=str(copy))

    sessions = []
    for session in dialogue.sessions:
        turns = (replace(turn, images=tuple(map(copied, turn.images))) for turn in session.turns)
        sessions.append(replace(session, turns=tuple(turns)))
    return Dialogue(dialogue.id, tuple(sessions))


def build_refmem(cfg: RefMemConfig) -> Path:
    """Build a benchmark, or finish what an earlier run left; prints the statistics.

    Returns:
        The benchmark (RefMem-Bench JSONL); with `until` the folder of that stage.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used, or annotations of another build.
        ConfigError: settings that do not fit, no chat model, or another build running in the folder.
        ModelError: a model or an endpoint that cannot be used.
    """
    cfg.check_endpoints()
    corpus = open_corpus(cfg)
    if cfg.style != "reflective":
        return _write_style(cfg, corpus)
    with RunFolder(cfg.out).held():
        build = Build(cfg, corpus)
        folder = build.run()
    for name, stage in build.done.items():
        print(f"{name:<10}{'unchanged' if stage.reused else 'done':<11}{_summary(stage.result)}")
    print(table(build.chats.ledger.summary()))
    if cfg.until != "benchmark":
        print(f"stage: {folder}")
        return folder
    print("\n" + (folder / "statistics.md").read_text(encoding="utf-8"))
    counts = read_json(folder / "statistics.json")["questions"]["by_dimension"]
    if missing := [name for name in DIMENSIONS if not counts[name]]:
        print(f"no items for: {', '.join(missing)}")
    print(f"benchmark: {folder / RESULT}")
    return folder / RESULT


def _write_style(cfg: RefMemConfig, corpus: Corpus) -> Path:
    """The benchmark of a style that has one stage; what was rejected is beside it, with reasons."""
    chats = Chats(cfg.llm)
    models = {stage: model.name for stage in STAGES_OF[cfg.style] if (model := chats.stage(stage)) is not None}
    own = cfg.p13n if cfg.style == "p13n" else cfg.session_questions
    made_with = prompts.prompt_id(personal.TEMPLATE if cfg.style == "p13n" else sessions.TEMPLATE)
    settings = {"source": content_key(corpus), "style": cfg.style, "settings": asdict(own)}

    def write(to: Path) -> dict[str, Any]:
        if cfg.style == "p13n":
            model = chats.stage("questions")
            assert model is not None
            writer = personal.Writer(model, cfg.p13n)
            questions, rejected, counts = writer.questions(corpus.dialogues), writer.rejected, writer.counts
        else:
            from remind.models.encoder import SentenceEncoder

            encoder = SentenceEncoder(device=cfg.device)
            questions, rejected, counts = sessions.session_questions(
                corpus.dialogues, chats, encoder, cfg.session_questions
            )
        if not questions:
            why = f"; {len(rejected)} rejected, the first: {rejected[0]['why']}" if rejected else ""
            raise DataError(f"no question is left{why}", Path(cfg.out))
        found = Corpus(corpus.dialogues, tuple(questions))
        if cfg.style == "p13n" and cfg.p13n.episode_turns is not None:
            found = personal.episodes(found, cfg.p13n.episode_turns)
        dialogues = tuple(_with_copies(to, number, dialogue) for number, dialogue in enumerate(found.dialogues))
        write_refmem(Corpus(dialogues, found.questions), to / RESULT)
        write_rows(to / "rejected.jsonl", rejected)
        return {**counts, "rejected": len(rejected), "kept": len(questions)}

    with RunFolder(cfg.out).held():
        stage = run_stage(Path(cfg.out) / cfg.style, {**settings, "made_by": models, "prompt_id": made_with}, write)
    print(f"{cfg.style:<10}{'unchanged' if stage.reused else 'done':<11}{_summary(stage.result)}")
    print(table(chats.ledger.summary()))
    print(f"questions: {stage.folder / RESULT}")
    return stage.folder / RESULT


def _summary(result: dict[str, Any]) -> str:
    """A stage's counts in a line."""
    parts = []
    for name, value in result.items():
        if isinstance(value, dict):
            value = " ".join(f"{key}:{count}" for key, count in value.items() if count)
        parts.append(f"{name.replace('_', ' ')} {' '.join(value) if isinstance(value, list) else value}")
    return ", ".join(parts)
