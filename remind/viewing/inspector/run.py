"""The command: from a states folder to pages on disk."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

from remind.build.config import BuildStatesConfig
from remind.build.plan import asked
from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file, sha256_json
from remind.core.progress import track
from remind.core.run_folder import RunFolder
from remind.data.dialogue import Corpus, Question
from remind.data.readers import read
from remind.evaluation.parse import parse_answer
from remind.grounding import Grounder
from remind.grounding.config import grounding_config
from remind.grounding.ground import folder_of_saes, load_saes
from remind.models import BUILT_IN
from remind.models.backbone import load_backbone
from remind.models.encoder import SentenceEncoder
from remind.states.dataset import MANIFEST, iterate_states, read_manifest
from remind.states.pyramid import LEVELS
from remind.states.records import StateRecord, blocks_of, factual_of, summary_of
from remind.viewing.config import InspectConfig
from remind.viewing.explanations import read_explanations
from remind.viewing.inspector.page import Inspection, LevelAnswer, index_row, page_row, write_index, write_page
from remind.viewing.workbench import reply


def inspect_grounding(cfg: InspectConfig) -> Path:
    """Write the page of one question, or of all with an index that grows with them; prints where.

    Pages of all questions that an earlier run with the same settings finished are kept.

    Returns:
        The page, or index.html.

    Raises:
        ConfigError: the page exists already, or the folder holds pages under other settings; or a setting that is
            neither in the states nor given.
        DataError, FormatError: states or corpus that cannot be used or do not fit each other; no such question.
        ModelError: SAEs that do not fit the backbone, or a model that cannot answer.
    """
    out, records = Path(cfg.out), _chosen(cfg)
    built = read_manifest(cfg.states).get("config", {})
    if not cfg.all:
        page = out if out.suffix == ".html" else out / page_name(records[0].question_id)
        if page.exists() and not cfg.overwrite:
            raise ConfigError(f"{page} exists; choose another out or set overwrite")
        Inspector(cfg, built).write(records[0], page)
        print(f"1 page: {page}")
        return page
    pages = {record.question_id: out / page_name(record.question_id) for record in records}
    with RunFolder(out).held() as folder:
        settings = {**asdict(cfg), "manifest": sha256_file(Path(cfg.states) / MANIFEST)}
        if cfg.overwrite:
            folder.write(settings)
            for page in pages.values():
                page.unlink(missing_ok=True)
        folder.claim(settings, resume=True, free=("all", "split", "limit", "out", "device", "overwrite"))
        rows = {name: page_row(page) for name, page in pages.items() if page.exists()}
        index = write_index(rows.values(), out / "index.html", str(cfg.states), len(records))
        todo = [record for record in records if record.question_id not in rows]
        inspector = Inspector(cfg, built) if todo else None
        for record in track(todo, "pages", len(todo)):
            assert inspector is not None
            rows[record.question_id] = inspector.write(record, pages[record.question_id], index.name)
            write_index((rows[name] for name in pages if name in rows), index, str(cfg.states), len(records))
    kept = f", {len(rows) - len(todo)} of them from before" if len(todo) < len(rows) else ""
    print(f"{len(rows)} page{'' if len(rows) == 1 else 's'}{kept}: {index}")
    return index


def _chosen(cfg: InspectConfig) -> list[StateRecord]:
    if cfg.all:
        records = list(islice(iterate_states(cfg.states, cfg.split), cfg.limit))
        if not records:
            raise DataError(f"no states{f' of split {cfg.split!r}' if cfg.split else ''}", cfg.states)
        return records
    ids: list[str] = []
    for record in iterate_states(cfg.states):
        if record.question_id == cfg.question:
            return [record]
        ids.append(record.question_id)
    raise DataError(f"no question {cfg.question!r}; there are {len(ids)}, such as {', '.join(ids[:3])}", cfg.states)


def page_name(question_id: str) -> str:
    """A file name for a question: its id if that is a plain name, else with a hash to tell it apart."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", question_id)[:80].strip("-")
    if plain == question_id and plain.lower() != "index":
        return f"{plain}.html"
    return f"{plain or 'question'}-{sha256_json(question_id)[:8]}.html"


class Inspector:
    """Inspects records of a states folder, with what is configured, else with what the manifest says.

    Attributes:
        names: explanations of features by layer, where a folder of them is given.
    """

    def __init__(self, cfg: InspectConfig, built: Mapping[str, Any]) -> None:
        self.cfg = cfg
        self.corpus = _corpus(cfg, built)
        name = cfg.backbone or str(built.get("backbone"))
        if cfg.backbone is None and name not in BUILT_IN and not Path(name).is_dir():
            raise ConfigError(f"the states' backbone {name[:80]!r} is not here; give --backbone and --sae")
        settings = cfg.grounding or grounding_config(built.get("grounding", {}), Path(cfg.states) / MANIFEST)
        folder = cfg.sae or built.get("sae")
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"the SAEs {folder} of the states are not there; give --sae")
        if folder is None:
            # the small SAEs that building trained and cached
            folder = folder_of_saes(None, (), name, BuildStatesConfig.cache, cfg.device, cfg.dtype)
        saes, idf = load_saes(folder)
        backbone = load_backbone(name, dtype=cfg.dtype, device=cfg.device)
        reads = settings.fuse is not None and settings.fuse.reads_text
        self.grounder = Grounder(backbone, saes, idf, settings, SentenceEncoder(device=cfg.device) if reads else None)
        used = {layer: saes[layer] for layer in self.grounder.encoder.saes}
        self.names = None if cfg.explanations is None else read_explanations(cfg.explanations, used)
        self.model = None if cfg.model is None else load_backbone(cfg.model, dtype=cfg.dtype, device=cfg.device)
        self.image_root = settings.image_root

    def write(self, record: StateRecord, page: Path, index: str | None = None) -> dict[str, Any]:
        """Ground the question of a record, let the model answer it where there is one, and write its page.

        Args:
            index: file name of the index page beside it, if there is one.

        Returns:
            Its row of the index.

        Raises:
            DataError: the corpus does not have the question, or not as it is in the states.
        """
        question = next((one for one in self.corpus.questions if one.id == record.question_id), None)
        if question is None:
            message = "the corpus does not have this question; give the one of the states"
            raise DataError(message, record=record.question_id)
        dialogue = self.corpus.dialogue(record.dialogue_id)
        inspection = Inspection(
            self.grounder.trace(factual_of(record, dialogue, question)),
            {name: record.level(name) for name in LEVELS},
            blocks_of(record.x1),
            record.split,
            record.salience,
            None if self.model is None else self.model.name,
            {} if self.model is None else {level: self._answer(record, question, level) for level in LEVELS},
            self.grounder.pictures is not None,
            summary_of(record),
        )
        for notice in inspection.notices:
            print(f"{record.question_id}: {notice}")
        cfg = self.cfg
        row = index_row(inspection, page.name)
        write_page(inspection, page, row, self.names, features=cfg.features, per_feature=cfg.per_feature, index=index)
        return row

    def _answer(self, record: StateRecord, question: Question, level: str) -> LevelAnswer:
        """What the model answers from a state, compared with the gold answer where options allow it."""
        assert self.model is not None
        output = reply(self.model, record, level, self.cfg.max_new_tokens, self.image_root)
        if output.failure is not None:
            return LevelAnswer(output, None, None)
        parsed = parse_answer(output.text, question.format, question.options, question.visual)
        known = question.format != "direct" and question.answers
        return LevelAnswer(output, parsed, parsed.letters == set(question.answers) if known else None)


def _corpus(cfg: InspectConfig, built: Mapping[str, Any]) -> Corpus:
    source = built.get("input") if cfg.corpus is None else cfg.corpus
    if source is None:
        raise ConfigError("the states do not name the dialogues they were built from; give --corpus")
    paths = [source] if isinstance(source, str) else source
    if missing := [path for path in paths if not Path(path).exists()]:
        raise ConfigError(f"the dialogues {missing[0]} are not there; give --corpus")
    kind = built.get("format") if cfg.corpus is None else cfg.format
    corpus = Corpus.merge([read(path, kind) for path in paths], paths)
    return asked(corpus, list(map(str, built["ask"]))) if isinstance(built.get("ask"), list) else corpus
