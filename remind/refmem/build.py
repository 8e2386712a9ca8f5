"""From dialogues to a benchmark: stages that run once, each in a folder under a key of all that it depends on."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from scipy.cluster.hierarchy import DisjointSet  # type: ignore[import-untyped]

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
from remind.core.run_folder import RunFolder, flatten
from remind.data.dialogue import DIMENSIONS, FORMATS, Corpus, Image
from remind.data.readers import mapping_files, read, write_refmem
from remind.evaluation.tables import markdown_table
from remind.llm.client import Chats
from remind.llm.ledger import table
from remind.refmem import items as drafts
from remind.refmem import styles
from remind.refmem.cluster import Cluster, clip_encoder, image_clusters, text_clusters
from remind.refmem.config import STAGES, STAGES_OF, RefMemConfig
from remind.refmem.items import Item, dialogue_of, near_pairs, read_items, read_records, write_items
from remind.states import prompts

#: The benchmark, in the folder of the last stage.
RESULT = "refmem.jsonl"
#: Part of every key; raise it when a stage writes something else than before.
VERSION = 3


class Stage(NamedTuple):
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

    def copied(folder: Path, image: Image) -> Image:
        if image.path is None:
            return image
        copy = folder / f"{image.index}{Path(image.path).suffix.lower()}"
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(image.path, copy)
        return replace(image, path=str(copy))

    places = ((one, to / "images" / str(number)) for number, one in enumerate(corpus.dialogues))
    dialogues = tuple(one.illustrated(partial(copied, folder)) for one, folder in places)
    write_refmem(Corpus(dialogues, corpus.questions), to / RESULT)


# the benchmark: train and test 2:8 by evidence cluster, and its counts as in Table 2 of the paper


def units(items: Sequence[Item], corpus: Corpus, near_duplicate: float) -> list[list[int]]:
    """Indices of the items that must stay together, so that no cluster and no piece of evidence is in both splits.

    They share a cluster, an evidence turn or an image, or are near-duplicates.
    """
    dialogues = corpus.dialogues
    turn_of = {(one.id, image.index): turn.id for one in dialogues for turn in one.turns for image in turn.images}
    together = DisjointSet(range(len(items)))
    first: dict[tuple[str, ...], int] = {}
    for number, item in enumerate(items):
        turns = {*item.evidence, *(turn_of[item.dialogue_id, index] for index in item.images)}
        for key in (("cluster", item.cluster_id), *((item.dialogue_id, turn) for turn in turns)):
            together.merge(number, first.setdefault(key, number))
    for i, j in near_pairs(items, near_duplicate):
        together.merge(i, j)
    return [sorted(group) for group in together.subsets()]


def split(items: Sequence[Item], corpus: Corpus, train: float, seed: int, near_duplicate: float) -> dict[str, str]:
    """Item id to "train" or "test".

    Units are dealt in an order of their ids and the seed; one goes to train while that brings its share closer to
    `train`. With two units or more, and 0 < `train` < 1, each split gets at least one.
    """
    dealt = sorted(
        units(items, corpus, near_duplicate),
        key=lambda unit: sha256(f"{seed}:{min(items[number].id for number in unit)}".encode()).hexdigest(),
    )
    target, taken = train * len(items), 0
    chosen: set[int] = set()
    for place, unit in enumerate(dealt):
        if abs(taken + len(unit) - target) < abs(taken - target) and (train == 1 or len(chosen) < len(dealt) - 1):
            chosen.add(place)
            taken += len(unit)
    if not chosen and 0 < train < 1 and len(dealt) > 1:
        chosen = {min(range(len(dealt)), key=lambda place: (len(dealt[place]), place))}
    return {
        items[number].id: "train" if place in chosen else "test" for place, unit in enumerate(dealt) for number in unit
    }


def statistics(corpus: Corpus, segments: int) -> dict[str, Any]:
    """Counts over dialogues and questions. Words are what white space separates; captions are not counted.

    Answer cardinality: answers per question, correct options or acceptable phrases. Anchors: evidence turns and images
    per question.
    """
    dialogues, questions = corpus.dialogues, corpus.questions
    words = [len(turn.text.split()) for dialogue in dialogues for turn in dialogue.turns]
    sizes = {
        "sessions": [len(one.sessions) for one in dialogues],
        "turns": [len(one.turns) for one in dialogues],
        "images": [len(one.images) for one in dialogues],
        "words": [sum(len(turn.text.split()) for turn in one.turns) for one in dialogues],
    }
    by_format = {name: [q for q in questions if q.format == name] for name in FORMATS}
    letters = Counter(answer for q in by_format["single"] for answer in q.answers)
    return {
        "conversations": {
            "contexts": len(dialogues),
            "segments": segments,
            **{name: sum(counts) for name, counts in sizes.items()},
            **{f"{name}_per_context": _mean(counts) for name, counts in sizes.items()},
            "turns_per_session": _mean([len(session.turns) for one in dialogues for session in one.sessions]),
            "turns_per_segment": round(len(words) / segments, 4) if segments else 0.0,
            "words_per_turn": _mean(words),
        },
        "questions": {
            "total": len(questions),
            "by_format": {name: len(own) for name, own in by_format.items()},
            "by_dimension": {name: sum(q.dimension == name for q in questions) for name in DIMENSIONS},
            "by_split": dict(sorted(Counter(q.split or "none" for q in questions).items())),
            "by_dimension_and_format": {
                name: dict(Counter(q.format for q in questions if q.dimension == name)) for name in DIMENSIONS
            },
            "options_per_item": _mean([len(q.options) for q in questions if q.format != "direct"]),
            "answer_cardinality": _mean([len(q.answers) for q in questions]),
            "answer_cardinality_by_format": {
                name: _mean([len(q.answers) for q in own]) for name, own in by_format.items()
            },
            "anchors_per_item": _mean([len(q.evidence) + len(q.images) for q in questions]),
            "letters_of_single": dict(sorted(letters.items())),
        },
    }


def as_markdown(counts: Mapping[str, Any], filters: Mapping[str, Any] | None = None) -> str:
    """The statistics as a page.

    Args:
        filters: counts of the filter stage, if there was one.
    """
    questions = dict(counts["questions"])
    cells, total = questions.pop("by_dimension_and_format"), questions["total"]
    rows = [
        (_title(name), _number(number) + (f" ({100 * number / total:.1f}%)" if total and name[:3] == "by_" else ""))
        for name, number in flatten(questions).items()
    ]
    dimensions = [[_title(name), *(_number(own.get(kind, 0)) for kind in FORMATS)] for name, own in cells.items()]
    parts = [
        "# Benchmark statistics\n",
        markdown_table(
            ["Conversations", ""], [(_title(key), _number(n)) for key, n in counts["conversations"].items()]
        ),
        markdown_table(["Questions", ""], rows),
        markdown_table(["Dimension", *FORMATS], dimensions),
    ]
    if filters is not None:
        removed = ((f"removed: {name.replace('_', ' ')}", _number(n)) for name, n in filters["removed"].items())
        steps = [("written", _number(filters["in"])), *removed, ("kept", _number(filters["kept"]))]
        parts.append(markdown_table(["Filter", "Items"], steps))
    return "\n".join(parts)


def _mean(values: Sequence[int]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0


def _title(name: str) -> str:
    text = name.replace("_", " ").replace(".", " ")
    return text[:1].upper() + text[1:]


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"
