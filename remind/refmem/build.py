"""From dialogues to a benchmark: stages that run once, each in a folder under a key of all that it depends on."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from remind.core.errors import DataError
from remind.core.files import (
    atomic_folder,
    input_hashes,
    read_json,
    sha256_file,
    sha256_json,
    write_json,
    write_rows,
    write_text,
)
from remind.core.run_folder import RunFolder
from remind.data.dialogue import Corpus, Dialogue, Image
from remind.data.readers import mapping_files, read, write_refmem
from remind.llm.client import Chats
from remind.llm.ledger import table
from remind.refmem import drafts, styles
from remind.refmem.benchmark import as_markdown, split, statistics
from remind.refmem.cluster import Cluster, clip_encoder, image_clusters, text_clusters
from remind.refmem.config import STAGES, STAGES_OF, RefMemConfig
from remind.refmem.items import dialogue_of, read_items, read_records, write_items
from remind.states import prompts

#: The benchmark, in the folder of the last stage.
RESULT = "refmem.jsonl"
#: Part of every key; raise it when a stage writes something else than before.
VERSION = 3


@dataclass(frozen=True)
class Stage:
    """A finished stage: its folder, its key, and what its writer returned."""

    folder: Path
    key: str
    result: dict[str, Any]


def run_stage(folder: Path, settings: dict[str, Any], write: Callable[[Path], dict[str, Any]]) -> Stage:
    """Run a stage unless its folder holds the result for these settings; prints its counts.

    Args:
        settings: JSON value of everything the result depends on, including the keys of earlier stages.
        write: fills an empty folder; its return value goes into manifest.json. Must not depend on the clock.
    """
    key = sha256_json([VERSION, folder.name, settings])
    manifest = folder / "manifest.json"
    reused = manifest.is_file() and read_json(manifest).get("key") == key
    if not reused:
        with atomic_folder(folder) as temporary:
            result = write(temporary)
            write_json(temporary / "manifest.json", {"key": key, "settings": settings, "result": result})
    stage = Stage(folder, key, read_json(manifest)["result"])
    counts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in stage.result.items())
    print(f"{folder.name:<10}{'unchanged' if reused else 'done':<11}{counts}")
    return stage


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
    paths = [cfg.input] if isinstance(cfg.input, str) else list(cfg.input)
    corpus = Corpus(Corpus.merge([read(path, cfg.format, cfg.images) for path in paths], paths).dialogues[: cfg.limit])
    chats, build = Chats(cfg.llm), _reflective if cfg.style == "reflective" else _one_stage
    source = {"files": input_hashes([*paths, *mapping_files(cfg.format)]), "limit": cfg.limit, "images": cfg.images}
    with RunFolder(cfg.out).held():
        for stage in build(cfg, corpus, chats, source):
            if stage.folder.name == cfg.until:
                break
    print(table(chats.ledger.summary()))
    result = stage.folder if stage.folder.name in STAGES[:-1] else stage.folder / RESULT
    if stage.folder.name == "benchmark":
        print("\n" + (stage.folder / "statistics.md").read_text(encoding="utf-8"))
    print(f"{stage.folder.name}: {result}")
    return result


def _reflective(cfg: RefMemConfig, corpus: Corpus, chats: Chats, source: dict[str, Any]) -> Iterator[Stage]:
    """The stages of RefMem-Bench's questions, one after the other."""
    out, writer, guesser = Path(cfg.out), chats.stage("questions"), chats.stage("answer")

    def write_clusters(to: Path) -> dict[str, Any]:
        from remind.models.encoder import SentenceEncoder

        encoder = SentenceEncoder(device=cfg.device)
        clip = None if cfg.clip is None else clip_encoder(cfg.clip, cfg.device)
        by_text, segments = text_clusters(corpus, encoder, cfg.segment, cfg.cluster)
        by_image, images = image_clusters(corpus, encoder, clip, cfg.image_cluster)
        write_rows(to / "clusters.jsonl", map(asdict, [*by_text, *by_image]))
        return {"segments": segments, "images": images, "clusters": {"text": len(by_text), "image": len(by_image)}}

    settings: dict[str, Any] = {
        "source": source,
        "segment": asdict(cfg.segment),
        "cluster": asdict(cfg.cluster),
        "image_cluster": asdict(cfg.image_cluster),
        "clip": cfg.clip,
        "encoder": "minilm",
    }
    clustered = run_stage(out / "clusters", settings, write_clusters)
    clusters = [one for _, one in read_records(clustered.folder / "clusters.jsonl", TypeAdapter(Cluster))]
    yield clustered
    assert writer is not None

    def write_drafts(to: Path) -> dict[str, Any]:
        items, counts = drafts.write_questions(corpus, clusters, writer, cfg.questions)
        write_items(to / "items.jsonl", items)
        return {**counts, "items": len(items)}

    settings = {"clusters": clustered.key, "items": asdict(cfg.questions), "made_by": writer.name}
    if cfg.questions.images == "pixels":
        paths = [image.path for dialogue in corpus.dialogues for image in dialogue.images]
        settings["pictures"] = [path and sha256_file(path) for path in paths]
    drafted = run_stage(out / "items", {**settings, "prompt_id": prompts.prompt_id(drafts.TEMPLATE)}, write_drafts)
    yield drafted

    def write_filtered(to: Path) -> dict[str, Any]:
        items = read_items(drafted.folder / "items.jsonl")
        reasons, no_guess = drafts.apply_filters(items, corpus, cfg.filters, guesser)
        kept = [item for item in items if item.id not in reasons]
        write_items(to / "items.jsonl", kept)
        removed = ({**asdict(item), "reason": reasons[item.id]} for item in items if item.id in reasons)
        write_rows(to / "removed.jsonl", removed)
        counts = Counter(reasons.values())
        return {
            "in": len(items),
            "kept": len(kept),
            "removed": {reason: counts[reason] for reason in drafts.REASONS},
            "blind_by": None if guesser is None else guesser.name,
            "no_guess": no_guess,
        }

    settings = {"items": drafted.key, "filters": asdict(cfg.filters), "blind_by": guesser and guesser.name}
    settings["prompt_id"] = prompts.prompt_id(drafts.BLIND_TEMPLATE)
    filtered = run_stage(out / "filtered", settings, write_filtered)
    yield filtered
    path = filtered.folder / "items.jsonl" if cfg.adjudicated is None else Path(cfg.adjudicated)
    items = read_items(path)
    if not items:
        raise DataError("no item is left; use longer dialogues or loosen clusters and filters", path)
    known = {(cluster.id, cluster.dialogue_id) for cluster in clusters}
    for item in items:
        if (item.cluster_id, item.dialogue_id) not in known:
            message = f"cluster {item.cluster_id!r} is not in this build; is the file from another?"
            raise DataError(message, path, item.id)
        dialogue_of(item, corpus, path)

    def write_benchmark(to: Path) -> dict[str, Any]:
        splits = split(items, corpus, cfg.train, cfg.seed, cfg.filters.near_duplicate)
        benchmark = Corpus(corpus.dialogues, tuple(item.as_question(splits[item.id]) for item in items))
        _write_refmem(benchmark, to)
        write_items(to / "items.jsonl", items)
        counts = statistics(benchmark, clustered.result["segments"])
        write_json(to / "statistics.json", {**counts, "filters": filtered.result})
        write_text(to / "statistics.md", as_markdown(counts, filtered.result))
        return {"prompts": sorted({item.prompt_id for item in items}), "total": len(items)}

    settings = {"filtered": filtered.key, "items": sha256_file(path), "train": cfg.train, "seed": cfg.seed}
    yield run_stage(out / "benchmark", settings, write_benchmark)


def _one_stage(cfg: RefMemConfig, corpus: Corpus, chats: Chats, source: dict[str, Any]) -> Iterator[Stage]:
    """The benchmark of a style that has one stage; what was rejected is beside it, with reasons."""
    models = {stage: model.name for stage in STAGES_OF[cfg.style] if (model := chats.stage(stage)) is not None}
    most = cfg.p13n.episode_turns if cfg.style == "p13n" else None
    own = cfg.p13n if cfg.style == "p13n" else cfg.session_questions
    made_with = prompts.prompt_id(styles.TEMPLATES[cfg.style])
    settings = {"source": source, "settings": asdict(own), "made_by": models, "prompt_id": made_with}

    def write(to: Path) -> dict[str, Any]:
        if cfg.style == "p13n":
            found = styles.personal_questions(corpus.dialogues, chats, cfg.p13n)
        else:
            from remind.models.encoder import SentenceEncoder

            encoder = SentenceEncoder(device=cfg.device)
            found = styles.session_questions(corpus.dialogues, chats, encoder, cfg.session_questions)
        questions, rejected, counts = found
        if not questions:
            why = f"; {len(rejected)} rejected, the first: {rejected[0]['why']}" if rejected else ""
            raise DataError(f"no question is left{why}", Path(cfg.out))
        asked = Corpus(corpus.dialogues, tuple(questions))
        if most is not None:
            cut = [styles.episode(asked.dialogue(one.dialogue_id), one, most) for one in questions]
            asked = Corpus(tuple(dialogue for dialogue, _ in cut), tuple(question for _, question in cut))
        _write_refmem(asked, to)
        write_rows(to / "rejected.jsonl", rejected)
        return {**counts, "rejected": len(rejected), "kept": len(questions)}

    yield run_stage(Path(cfg.out) / cfg.style, settings, write)


def _write_refmem(corpus: Corpus, to: Path) -> None:
    """The benchmark, and its image files beside it, where its reader looks for them."""

    def copied(image: Image, folder: Path) -> Image:
        if image.path is None:
            return image
        copy = folder / f"{image.index}{Path(image.path).suffix.lower()}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image.path, copy)
        return replace(image, path=str(copy))

    dialogues = []
    for number, dialogue in enumerate(corpus.dialogues):
        folder, made = to / "images" / str(number), []
        for one in dialogue.sessions:
            turns = [replace(turn, images=tuple(copied(image, folder) for image in turn.images)) for turn in one.turns]
            made.append(replace(one, turns=tuple(turns)))
        dialogues.append(Dialogue(dialogue.id, tuple(made)))
    write_refmem(Corpus(tuple(dialogues), corpus.questions), to / RESULT)
