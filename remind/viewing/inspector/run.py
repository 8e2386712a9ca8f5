"""The command: from a states folder to pages on disk."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remind.build.plan import asked
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import sha256_json
from remind.core.progress import ProgressBar, track
from remind.data.dialogue import Corpus
from remind.data.readers import read
from remind.grounding.config import grounding_config
from remind.models import BUILT_IN
from remind.viewing.config import InspectConfig

if TYPE_CHECKING:
    from remind.models.backbone import Backbone
    from remind.models.chat import Content
    from remind.states.records import StateRecord
    from remind.viewing.inspector.inspection import Inspection
    from sae import TopKSAE
    from sae.probe import TopExamples


def inspect_grounding(cfg: InspectConfig) -> Path:
    """Write the page of one question, or of all with an index; prints where.

    Returns:
        The page, or index.html.

    Raises:
        ConfigError: pages exist already, or a setting that is neither in the states nor given.
        DataError, FormatError: states or corpus that cannot be used or do not fit each other; no such question.
        ModelError: SAEs that do not fit the backbone, or a model that cannot answer.
    """
    from remind.states.dataset import read_manifest
    from remind.viewing.inspector.page import index_row, write_index, write_page

    out = Path(cfg.out)
    single = out.suffix == ".html"
    target = out if single else out / "index.html"
    if target.exists() and not cfg.overwrite:
        raise ConfigError(f"{target} exists; choose another out or set overwrite")
    manifest = read_manifest(cfg.states)
    # states are read twice, so that their prompts need not all be in memory
    names = page_names(record.question_id for record in _chosen(cfg))
    inspector = Inspector(cfg, manifest.get("config", {}))
    rows = []
    for record, name in track(zip(_chosen(cfg), names, strict=True), "pages", len(names)):
        inspection = inspector.inspect(record)
        page = write_page(
            inspection,
            out if single else out / name,
            examples=inspector.examples,
            names=inspector.names,
            features=cfg.features,
            per_feature=cfg.per_feature,
            index="index.html" if cfg.all else None,
        )
        rows.append(index_row(inspection, name))
        for notice in inspection.notices:
            print(f"{record.question_id}: {notice}")
    if cfg.all:
        page = write_index(rows, target, str(cfg.states))
    print(f"{len(rows)} page{'' if len(rows) == 1 else 's'}: {page}")
    return page


def _chosen(cfg: InspectConfig) -> Iterator[StateRecord]:
    from remind.states.dataset import iterate_states

    if cfg.all:
        number = 0
        for number, record in enumerate(iterate_states(cfg.states, cfg.split), start=1):
            yield record
            if number == cfg.limit:
                return
        if not number:
            raise DataError(f"no states{f' of split {cfg.split!r}' if cfg.split else ''}", cfg.states)
        return
    ids: list[str] = []
    for record in iterate_states(cfg.states):
        if record.question_id == cfg.question:
            yield record
            return
        ids.append(record.question_id)
    near = difflib.get_close_matches(str(cfg.question), ids, n=3, cutoff=0.3) or ids[:3]
    raise DataError(f"no question {cfg.question!r}; there are {len(ids)}, such as {', '.join(near)}", cfg.states)


def page_names(ids: Iterable[str]) -> list[str]:
    """A file name for each question: its id if that is a plain name, else with a hash to tell names apart."""
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


class Inspector:
    """Inspects records of a states folder, with what is configured, else with what the manifest says.

    Attributes:
        examples: top examples of the features by layer, where a corpus for them is given.
        names: explanations of features by layer, where a folder of them is given.
    """

    def __init__(self, cfg: InspectConfig, built: Mapping[str, Any]) -> None:
        from remind.build.config import BuildStatesConfig
        from remind.grounding import Grounder
        from remind.grounding.ground import folder_of_saes, load_saes
        from remind.models.backbone import load_backbone
        from remind.models.encoder import SentenceEncoder
        from remind.models.generate import check_generates
        from remind.models.images import Pictures
        from remind.states.dataset import MANIFEST
        from remind.train_pra.export import images_in_training
        from remind.viewing.explanations import read_explanations

        self.cfg = cfg
        self.corpus = _corpus(cfg, built)
        name = cfg.backbone or _manifest_backbone(built)
        settings = cfg.grounding or grounding_config(built.get("grounding", {}), Path(cfg.states) / MANIFEST)
        folder = cfg.sae or built.get("sae")
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"the SAEs {folder} of the states are not there; give --sae")
        if folder is None:
            # the small SAEs that building trained and cached
            folder = folder_of_saes(None, (), name, BuildStatesConfig.cache, cfg.device, cfg.dtype)
        saes, idf = load_saes(folder)
        self.names = None if cfg.explanations is None else read_explanations(cfg.explanations, saes)
        backbone = load_backbone(name, dtype=cfg.dtype, device=cfg.device)
        reads = settings.fuse is not None and settings.fuse.reads_text
        self.grounder = Grounder(backbone, saes, idf, settings, SentenceEncoder(device=cfg.device) if reads else None)
        self.examples = None
        if cfg.examples is not None:
            used = {layer: saes[layer] for layer in self.grounder.encoder.saes}
            self.examples = _corpus_examples(cfg, backbone, used, _list(cfg.examples))
        self.answerer, self.pictures = None, None
        if cfg.model is not None:
            self.answerer = load_backbone(cfg.model, dtype=cfg.dtype, device=cfg.device)
            check_generates(self.answerer)
            images, tokens = images_in_training(None if cfg.model in BUILT_IN else cfg.model)
            if images == "pixels":
                self.pictures = Pictures(self.answerer, tokens, settings.image_root, "grounding.")

    def inspect(self, record: StateRecord) -> Inspection:
        """Ground the question of a record, and let the model answer it where there is one."""
        from remind.models.generate import generate
        from remind.models.images import level_content
        from remind.viewing.inspector.inspection import inspect_record, level_answers

        question = next((one for one in self.corpus.questions if one.id == record.question_id), None)
        if question is None:
            message = "the corpus does not have this question; give the one of the states"
            raise DataError(message, record=record.question_id)
        inspection = inspect_record(self.grounder, record, self.corpus.dialogue(record.dialogue_id), question)
        if self.answerer is None:
            return inspection
        prompts: list[Content] = [rendered.text for rendered in inspection.levels.values()]
        if self.pictures is not None:
            prompts = [level_content(record, level) for level in inspection.levels]
        most = self.cfg.max_new_tokens
        generations = generate(self.answerer, prompts, most, batch_size=1, pictures=self.pictures)
        outputs = {level: one for level, one in zip(inspection.levels, generations, strict=True) if one is not None}
        return replace(inspection, model=self.answerer.name, answers=level_answers(question, outputs))


def _manifest_backbone(built: Mapping[str, Any]) -> str:
    """The backbone of a manifest. States may come from others, so their manifest must not start a download."""
    name = built.get("backbone")
    if name is None:
        raise ConfigError("the states name no backbone they were grounded with; give --backbone and --sae")
    try:
        is_folder = isinstance(name, str) and bool(name) and Path(name).expanduser().is_dir()
    except (OSError, ValueError, RuntimeError):  # a name too long, a zero byte, the home of an unknown user
        is_folder = False
    if name not in BUILT_IN and not is_folder:
        raise ConfigError(
            f"the states name the backbone {str(name)[:80]!r}, which is neither built in nor a folder here, and "
            "nothing is downloaded because states name it; give --backbone"
        )
    return str(name)


def _corpus(cfg: InspectConfig, built: Mapping[str, Any]) -> Corpus:
    source = built.get("input") if cfg.corpus is None else cfg.corpus
    if source is None:
        raise ConfigError("the states do not name the dialogues they were built from; give --corpus")
    paths = _list(source)
    if missing := [path for path in paths if not Path(path).exists()]:
        raise ConfigError(f"the dialogues {missing[0]} are not there; give --corpus")
    kind = built.get("format") if cfg.corpus is None else cfg.format
    corpus = Corpus.merge([read(path, kind) for path in paths], paths)
    return asked(corpus, list(map(str, built["ask"]))) if isinstance(built.get("ask"), list) else corpus


def _corpus_examples(
    cfg: InspectConfig, backbone: Backbone, saes: Mapping[int, TopKSAE], paths: list[str]
) -> dict[int, TopExamples]:
    """The turns of a corpus on which each feature fires most strongly, by layer; turns are encoded one by one."""
    from remind.states.pyramid import line_of
    from sae import SAEError
    from sae.probe import Probe, collect

    dialogues = (dialogue for path in paths for dialogue in read(path).dialogues)
    lines = ((f"{dialogue.id} {turn.id}", line_of(turn)) for dialogue in dialogues for turn in dialogue.turns)
    texts = list(islice(lines, cfg.examples_limit))
    try:
        probe = Probe(backbone.model, backbone.tokenizer, saes)
        with ProgressBar("examples", len(texts)) as bar:
            return collect(probe, texts, per_feature=cfg.per_feature, context=(10, 10), progress=bar.advance_to)
    except SAEError as error:
        raise ModelError(f"examples: {error}") from None


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else list(value)
