"""From a states folder to pages on disk."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_json
from remind.core.progress import track
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.grounding.config import grounding_config
from remind.states.parquet import MANIFEST, StateRecord, iterate_states, read_manifest
from remind.viewing.inspector.collect import Inspection, inspect_record, level_answers
from remind.viewing.inspector.config import InspectConfig
from remind.viewing.inspector.index import IndexRow, write_index
from remind.viewing.inspector.page import write_page

if TYPE_CHECKING:
    from remind.grounding import Grounder
    from remind.models.backbone import Backbone
    from sae.probe import TopExamples


@dataclass(frozen=True)
class _Tools:
    corpus: Corpus
    grounder: Grounder
    examples: Mapping[int, TopExamples] | None
    answerer: Backbone | None


def inspect_grounding(cfg: InspectConfig) -> Path:
    """Write the page of one question, or of all with an index; prints where.

    Returns:
        The page, or index.html.

    Raises:
        ConfigError: pages that are there already, or settings the states do not tell and nobody gave.
        DataError, FormatError: states or corpus that cannot be used or do not fit each other; no such question.
        ModelError: SAEs that do not fit the backbone, or a model that cannot answer.
    """
    out = Path(cfg.out)
    single = out.suffix == ".html"
    target = out if single else out / "index.html"
    if target.exists() and not cfg.overwrite:
        raise ConfigError(f"{target} exists; choose another out or set overwrite")
    manifest = read_manifest(cfg.states)
    # twice through the states: their prompts need not all be in memory
    names = page_names(record.question_id for record in _chosen(cfg))
    tools = _tools(cfg, manifest.get("config", {}))
    rows = []
    for record, name in track(zip(_chosen(cfg), names, strict=True), "pages", len(names)):
        inspection = _inspection(cfg, record, tools)
        page = write_page(
            inspection,
            out if single else out / name,
            examples=tools.examples,
            features=cfg.features,
            per_feature=cfg.per_feature,
            index=None if single or not cfg.all else "index.html",
        )
        rows.append(IndexRow.of(inspection, name))
        for notice in inspection.notices:
            print(f"{record.question_id}: {notice}")
    if not single:
        page = write_index(rows, out / "index.html", str(cfg.states)) if cfg.all else page
    print(f"{len(rows)} page{'' if len(rows) == 1 else 's'}: {page}")
    return page


def _chosen(cfg: InspectConfig) -> Iterator[StateRecord]:
    if cfg.all:
        found = 0
        for record in iterate_states(cfg.states, cfg.split):
            if cfg.limit is not None and found >= cfg.limit:
                break
            found += 1
            yield record
        if not found:
            raise DataError(f"no states{f' of split {cfg.split!r}' if cfg.split else ''}", cfg.states)
        return
    seen: list[str] = []
    for record in iterate_states(cfg.states):
        if record.question_id == cfg.question:
            yield record
            return
        seen.append(record.question_id)
    near = difflib.get_close_matches(str(cfg.question), seen, n=3, cutoff=0.3) or seen[:3]
    raise DataError(f"no question {cfg.question!r}; there are {len(seen)}, such as {', '.join(near)}", cfg.states)


def page_names(ids: Sequence[str] | Iterator[str]) -> list[str]:
    """A file name for each question: its id where that makes a plain one, told apart by a hash where it does not."""
    names: list[str] = []
    taken = {"index.html"}
    for question_id in ids:
        plain = re.sub(r"[^A-Za-z0-9_-]+", "-", question_id)[:80].strip("-")
        name = f"{plain}.html"
        if not plain or plain != question_id or name.lower() in taken:
            name = f"{plain or 'question'}-{sha256_json(question_id)[:8]}.html"
        taken.add(name.lower())
        names.append(name)
    return names


def _tools(cfg: InspectConfig, built: Mapping[str, Any]) -> _Tools:
    from remind.grounding import Grounder
    from remind.grounding.load import folder_of_saes, load_saes
    from remind.models.encoder import SentenceEncoder
    from remind.models.load import load_backbone
    from remind.pipeline.config import BuildStatesConfig
    from remind.viewing.inspector.examples import corpus_examples

    corpus = _corpus(cfg, built)
    name = cfg.backbone or _told_backbone(built)
    settings = cfg.grounding or grounding_config(built.get("grounding", {}), Path(cfg.states) / MANIFEST)
    folder = cfg.sae or built.get("sae")
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"the SAEs {folder} of the states are not there; give --sae")
    if folder is None:
        # the small ones that building trained and kept
        data = built.get("sae_data") or []
        data = [data] if isinstance(data, str) else data
        folder = folder_of_saes(None, data, name, BuildStatesConfig.cache, cfg.device, cfg.dtype)
    saes, idf = load_saes(folder)
    backbone = load_backbone(name, dtype=cfg.dtype, device=cfg.device)
    reads = settings.fuse is not None and settings.fuse.reads_text
    grounder = Grounder(backbone, saes, idf, settings, SentenceEncoder(device=cfg.device) if reads else None)
    examples = None
    if cfg.examples is not None:
        dialogues = (dialogue for path in _paths(cfg.examples) for dialogue in read(path).dialogues)
        used = {layer: saes[layer] for layer in grounder.encoder.saes}
        examples = corpus_examples(backbone, used, dialogues, cfg.examples_limit, cfg.per_feature)
    answerer = None
    if cfg.model is not None:
        from remind.models.generate import check_generates

        answerer = load_backbone(cfg.model, dtype=cfg.dtype, device=cfg.device)
        check_generates(answerer)
    return _Tools(corpus, grounder, examples, answerer)


def _told_backbone(built: Mapping[str, Any]) -> str:
    """The backbone of a manifest, which may be another's: it may not make this machine ask the hub."""
    name = built.get("backbone")
    if name is None:
        raise ConfigError("the states do not tell what backbone they were grounded with; give --backbone and --sae")
    try:
        there = isinstance(name, str) and bool(name) and Path(name).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # a name too long, a zero byte, a home of nobody
        there = False
    if name not in ("minilm", "nano", "nano-untrained") and not there:
        raise ConfigError(
            f"the states name the backbone {str(name)[:80]!r}, which is neither built in nor a folder here, and "
            "nothing is fetched because states name it; give --backbone"
        )
    return str(name)


def _paths(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _corpus(cfg: InspectConfig, built: Mapping[str, Any]) -> Corpus:
    given = cfg.corpus if cfg.corpus is not None else built.get("input")
    if given is None:
        raise ConfigError("the states do not tell what dialogues they were built from; give --corpus")
    if missing := [path for path in _paths(given) if not Path(path).exists()]:
        raise ConfigError(f"the dialogues {missing[0]} are not there; give --corpus")
    kind = cfg.format if cfg.corpus is not None else built.get("format")
    return Corpus.merge([read(path, kind) for path in _paths(given)], _paths(given))


def _inspection(cfg: InspectConfig, record: StateRecord, tools: _Tools) -> Inspection:
    question = next((one for one in tools.corpus.questions if one.id == record.question_id), None)
    if question is None:
        raise DataError("the corpus does not have this question; give the one of the states", record=record.question_id)
    found = inspect_record(tools.grounder, record, tools.corpus.dialogue(record.dialogue_id), question)
    if tools.answerer is None:
        return found
    from remind.models.generate import generate

    texts = [rendered.text for rendered in found.levels.values()]
    outputs = generate(tools.answerer, texts, cfg.max_new_tokens, batch_size=1)
    said = {level: output for level, output in zip(found.levels, outputs, strict=True) if output is not None}
    return replace(found, model=tools.answerer.name, answers=level_answers(question, said))
