"""From dialogues to a benchmark: segments, images, clusters, items, filters, split; each stage is done once."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from remind.core.errors import ConfigError, DataError
from remind.core.files import read_json, sha256_file, sha256_json, write_json, write_text
from remind.data.dialogue import DIMENSIONS, Corpus, Dialogue
from remind.data.readers import read, write_refmem
from remind.data.split import check_overlap
from remind.llm.chat_models import Chats
from remind.llm.ledger import table
from remind.refmem import blind, generate, offline
from remind.refmem.cluster import Cluster, image_clusters, read_clusters, text_clusters, write_clusters
from remind.refmem.config import RefMemConfig, StageName
from remind.refmem.filters import make_filtered
from remind.refmem.images import make_images, read_images
from remind.refmem.items import Item, anchors_missing, read_items, write_items
from remind.refmem.segments import make_segments, read_segments
from remind.refmem.split import check_split, split
from remind.refmem.stages import Stages, locked
from remind.refmem.statistics import as_markdown, statistics
from remind.states import prompts

if TYPE_CHECKING:
    from remind.models.encoder import SentenceEncoder

#: What a build is made into, in the folder of its last stage.
RESULT = "refmem.jsonl"


def open_corpus(cfg: RefMemConfig) -> Corpus:
    """The dialogues of the input without their questions.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used.
    """
    paths = [cfg.input] if isinstance(cfg.input, str) else list(cfg.input)
    dialogues = Corpus.merge([read(path, cfg.format) for path in paths], paths).dialogues[: cfg.limit]
    if not dialogues:
        raise ConfigError("the input holds no dialogues")
    return Corpus(dialogues)


def content_key(corpus: Corpus) -> str:
    """Hash of all that is said and shown; of pixels their files' bytes, wherever they lie."""

    def told(dialogue: Dialogue) -> list[Any]:
        turns = [
            [turn.id, turn.speaker, turn.text, turn.time]
            + [[i.caption, i.source, None if i.path is None else sha256_file(i.path)] for i in turn.images]
            for turn in dialogue.turns
        ]
        return [dialogue.id, [[one.id, one.time, len(one.turns)] for one in dialogue.sessions], turns]

    return sha256_json([told(dialogue) for dialogue in corpus.dialogues])


class Build:
    """One build: its input, its settings and its stages.

    Raises:
        ConfigError, ModelError: an endpoint that cannot be used; told before any work.
    """

    def __init__(self, cfg: RefMemConfig, corpus: Corpus) -> None:
        self.cfg, self.corpus = cfg, corpus
        self.stages = Stages(Path(cfg.out))
        self.chats = Chats(cfg.llm)
        self.writer, self.guesser = self.chats.stage("questions"), self.chats.stage("answer")
        self.source = content_key(corpus)

    def run(self, until: StageName = "benchmark") -> Path:
        """Do what is not done yet, up to a stage; returns that stage's folder."""
        wanted = get_args(StageName).index(until)
        steps = (self.segments, self.images, self.clusters, self.items, self.filtered, self.benchmark)
        for step in steps[: wanted + 1]:
            folder, _ = step()
        return folder

    @cache  # noqa: B019  a build lives as long as its process
    def encoder(self) -> SentenceEncoder:
        from remind.models.encoder import SentenceEncoder

        return SentenceEncoder(device=self.cfg.device)

    @cache  # noqa: B019
    def segments(self) -> tuple[Path, str]:
        settings = {"source": self.source, "segment": asdict(self.cfg.segment), "encoder": "minilm"}
        return self.stages.run(
            "segments", settings, lambda to: make_segments(to, self.corpus, self.encoder(), self.cfg.segment)
        )

    @cache  # noqa: B019
    def images(self) -> tuple[Path, str]:
        clip = self.cfg.clip
        # a folder may be filled anew; what a hub id names is taken to stay
        weights = [sha256_file(file) for file in sorted(Path(clip).glob("*.safetensors"))] if clip is not None else []
        settings = {"source": self.source, "clip": clip, "weights": weights, "encoder": "minilm"}
        return self.stages.run(
            "images",
            settings,
            lambda to: make_images(to, self.corpus, self.encoder(), self.cfg.clip, self.cfg.device),
        )

    @cache  # noqa: B019
    def clusters(self) -> tuple[Path, str]:
        (segments, segments_key), (images, images_key) = self.segments(), self.images()
        settings = {
            "segments": segments_key,
            "images": images_key,
            "cluster": asdict(self.cfg.cluster),
            "image_cluster": asdict(self.cfg.image_cluster),
        }

        def write(to: Path) -> dict[str, Any]:
            found = text_clusters(self.corpus, *read_segments(segments), self.cfg.cluster)
            found += image_clusters(self.corpus, *read_images(images), self.cfg.image_cluster)
            return write_clusters(to, found)

        return self.stages.run("clusters", settings, write)

    @cache  # noqa: B019
    def items(self) -> tuple[Path, str]:
        folder, key = self.clusters()
        template = offline.TEMPLATE if self.writer is None else generate.TEMPLATE
        settings = {
            "clusters": key,
            "items": asdict(self.cfg.questions),
            "made_by": offline.NAME if self.writer is None else self.writer.name,
            "prompt_id": prompts.prompt_id(template),
        }

        def write(to: Path) -> dict[str, Any]:
            clusters = read_clusters(folder)
            told: dict[str, int] = {}
            if self.writer is None:
                made = offline.write_offline(self.corpus, clusters, self.cfg.questions)
            else:
                made, told = generate.write_asked(self.corpus, clusters, self.writer, self.cfg.questions)
            write_items(to / "items.jsonl", made)
            return {**told, "items": len(made)}

        return self.stages.run("items", settings, write)

    @cache  # noqa: B019
    def filtered(self) -> tuple[Path, str]:
        folder, key = self.items()
        settings = {
            "items": key,
            "filters": asdict(self.cfg.filters),
            "blind_by": "rules" if self.guesser is None else self.guesser.name,
            "prompt_id": None if self.guesser is None else prompts.prompt_id(blind.TEMPLATE),
        }

        def write(to: Path) -> dict[str, Any]:
            return make_filtered(to, read_items(folder / "items.jsonl"), self.corpus, self.cfg.filters, self.guesser)

        return self.stages.run("filtered", settings, write)

    def benchmark(self) -> tuple[Path, str]:
        """Split, statistics and the file itself, from the filtered items or from those that annotators left."""
        clusters, _ = self.clusters()
        segments, _ = self.segments()
        filtered, key = self.filtered()
        given = self.cfg.adjudicated
        source = filtered / "items.jsonl" if given is None else Path(given)
        if not source.is_file():
            raise DataError("no such file", source)
        settings = {
            "filtered": key,
            "adjudicated": None if given is None else sha256_file(source),
            "train": self.cfg.train,
            "seed": self.cfg.seed,
            "near_duplicate": self.cfg.filters.near_duplicate,
        }

        def write(to: Path) -> dict[str, Any]:
            items = read_items(source)
            if given is not None:
                self._check_own(items, read_clusters(clusters), source)
            if not items:
                raise DataError("no item is left; use longer dialogues or loosen clusters and filters", source)
            near = self.cfg.filters.near_duplicate
            sides = split(items, self.corpus, self.cfg.train, self.cfg.seed, near)
            check_split(items, self.corpus, sides, near)
            count = read_json(segments / "manifest.json")["result"]["segments"]
            counts = read_json(filtered / "manifest.json")["result"]
            told = write_benchmark(to, self.corpus, items, sides, count, counts)
            return {"prompts": sorted({item.prompt_id for item in items}), "total": told["questions"]["total"]}

        return self.stages.run("benchmark", settings, write)

    def _check_own(self, items: Sequence[Item], clusters: Sequence[Cluster], path: Path) -> None:
        known = {cluster.id: cluster.dialogue_id for cluster in clusters}
        for item in items:
            if known.get(item.cluster_id) != item.dialogue_id:
                raise DataError(f"cluster {item.cluster_id!r} is none of this build's; is it another's?", path, item.id)
            if anchors_missing(item, self.corpus.dialogue(item.dialogue_id)):
                raise DataError("its evidence is missing or names what is not in the dialogue", path, item.id)


def write_benchmark(
    to: Path, corpus: Corpus, items: Sequence[Item], sides: dict[str, str], segments: int, filters: dict[str, Any]
) -> dict[str, Any]:
    """Write refmem.jsonl (with copies of images that have pixels), items.jsonl, statistics.json and statistics.md.

    Returns:
        The statistics.

    Raises:
        DataError: the file does not read back as what was written, or its splits overlap.
    """
    dialogues = tuple(_with_copies(to, number, dialogue) for number, dialogue in enumerate(corpus.dialogues))
    questions = tuple(item.as_question(sides[item.id]) for item in items)
    made = Corpus(dialogues, questions)
    write_refmem(made, to / RESULT)
    again = read(to / RESULT)
    if again.questions != questions or again.dangling:
        raise DataError("the benchmark does not read back as it was written", to / RESULT)
    check_overlap(
        ((q.id, q.dialogue_id, sides[q.id], (*q.evidence, *q.images)) for q in again.questions), lambda _: to / RESULT
    )
    write_items(to / "items.jsonl", items)
    told = statistics(made, segments)
    write_json(to / "statistics.json", {**told, "filters": filters})
    write_text(to / "statistics.md", as_markdown(told, filters))
    return told


def _with_copies(to: Path, number: int, dialogue: Dialogue) -> Dialogue:
    """The dialogue with its image files copied beside the benchmark, where its reader wants them."""
    copies = {}
    for image in dialogue.images:
        if image.path is not None:
            copy = to / "images" / str(number) / f"{image.index}{Path(image.path).suffix.lower()}"
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image.path, copy)
            copies[image.index] = str(copy)
    if not copies:
        return dialogue
    sessions = tuple(
        replace(
            session,
            turns=tuple(
                replace(turn, images=tuple(replace(i, path=copies.get(i.index)) for i in turn.images))
                for turn in session.turns
            ),
        )
        for session in dialogue.sessions
    )
    return Dialogue(dialogue.id, sessions)


def build_refmem(cfg: RefMemConfig) -> Path:
    """Build, or finish what an earlier run left; prints the statistics and what is not covered.

    Returns:
        The benchmark (RefMem-Bench JSONL); with `until` the folder of that stage.

    Raises:
        DataError, ImagePathError, FormatError: an input that cannot be used, or annotations of another build.
        ConfigError: settings that do not fit, or another build at work in the folder.
        ModelError: a model or an endpoint that cannot be used.
    """
    corpus = open_corpus(cfg)
    with locked(Path(cfg.out)):
        build = Build(cfg, corpus)
        folder = build.run(cfg.until)
    for name, found in build.stages.done.items():
        result = read_json(Path(cfg.out) / name / "manifest.json")["result"]
        print(f"{name:<10}{'found  ' if found else 'done   '}{_line(result)}")
    if cfg.llm.endpoint("questions") is not None or cfg.llm.endpoint("answer") is not None:
        print(table(build.chats.ledger.summary()))
    if cfg.until != "benchmark":
        print(f"stage: {folder}")
        return folder
    told = read_json(folder / "statistics.json")
    print("\n" + (folder / "statistics.md").read_text(encoding="utf-8"))
    missing = [name for name in DIMENSIONS if not told["questions"]["by_dimension"][name]]
    if missing:
        print(f"no items for: {', '.join(missing)}")
    print(f"benchmark: {folder / RESULT}")
    return folder / RESULT


def _line(result: dict[str, Any]) -> str:
    parts = []
    for name, value in result.items():
        if isinstance(value, dict):
            value = " ".join(f"{key}:{count}" for key, count in value.items() if count)
        elif isinstance(value, list):
            value = " ".join(map(str, value))
        if value not in (None, ""):
            parts.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(parts)
