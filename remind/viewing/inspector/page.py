"""What the inspector shows of a question, its page, the index of many, and the command that writes them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import numpy as np
from torch import Tensor

from remind.build.config import BuildStatesConfig
from remind.build.plan import asked
from remind.core.errors import ConfigError, DataError
from remind.core.files import sha256_file, sha256_json, write_text
from remind.core.progress import track
from remind.core.run_folder import RunFolder
from remind.data.dialogue import Corpus, Question, gold_turns
from remind.data.readers import read
from remind.evaluation.parse import ParsedAnswer, parse_answer
from remind.grounding import Grounder, GroundingTrace
from remind.grounding.config import grounding_config
from remind.grounding.ground import folder_of_saes, load_saes
from remind.grounding.resonance import local_alignment
from remind.models import BUILT_IN
from remind.models.backbone import load_backbone
from remind.models.encoder import SentenceEncoder
from remind.models.generate import Generation
from remind.models.images import thumbnail
from remind.states.dataset import MANIFEST, iterate_states, read_manifest
from remind.states.pyramid import LETTERS, LEVELS, FactualState, Rendered, Span
from remind.states.records import FACTUAL, StateRecord, blocks_of, factual_of, summary_of
from remind.viewing.config import InspectConfig
from remind.viewing.explanations import Explanation, read_explanations
from remind.viewing.pages import marked_turns
from remind.viewing.workbench import reply
from sae.pages import data_of, digits, page, utf16

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
#: Tokens shown to the left and to the right of an example's peak.
CONTEXT = 7
#: Features named for a turn, and for the whole guidance.
CARRIED, GUIDING = 5, 12
#: Longer side of an image in the page, in pixels.
PICTURE_SIZE = 240
_PACKAGE = "remind.viewing.inspector"


class LevelAnswer(NamedTuple):
    """What a model answered from one state.

    `correct` is None where only a judge could tell; `parsed` is None where generation failed.
    """

    output: Generation
    parsed: ParsedAnswer | None
    correct: bool | None


class Inspection:
    """One question, its grounding, and its states.

    Args:
        trace: grounding, computed for this page.
        record: its states; the blocks that are shown are those of its x1.
        model: name of the model that answered, or None. answers: by level.
        pixels: whether grounding was shown images as pixels; the page then shows them, too.

    Attributes:
        kind: of the question, if it was inferred. summary: what x2 adds to x1.
        blocks: inclusive ranges over the retrieved turns. marked, gold: indices of those inside blocks, and of those
            that are gold evidence.
        gold_positions: positions in the dialogue of all gold evidence turns, retrieved or not.
    """

    def __init__(
        self,
        trace: GroundingTrace,
        record: StateRecord,
        model: str | None = None,
        answers: Mapping[str, LevelAnswer] | None = None,
        pixels: bool = False,
    ) -> None:
        self.trace, self.record, self.model, self.answers, self.pixels = trace, record, model, answers or {}, pixels
        self.state: FactualState = trace.state.factual
        self.question, told = self.state.question, self.state.told
        self.kind = None if told is None else told.dimension or FACTUAL
        self.summary, self.blocks = summary_of(record), blocks_of(record.x1)
        self.marked = marked_turns(self.blocks)
        self.gold = frozenset(gold_turns(self.question, self.state.turns))
        self.gold_positions = gold_turns(self.question, self.state.dialogue.turns)

    @property
    def notices(self) -> list[str]:
        """Differences between the states and this page's grounding that a reader must know of."""
        notices, computed = [], self.trace.state
        if self.blocks != computed.blocks:
            marked = marked_turns(computed.blocks)
            notices.append(
                f"The outlined blocks are those of the states; with the settings of this page grounding would mark "
                f"{len(marked)} turns, not {len(self.marked)}, and {len(marked ^ self.marked)} of them differ."
            )
        # equal up to the rounding of another batch or machine
        if self.record.salience and not np.allclose(self.record.salience, computed.salience, rtol=1e-3, atol=1e-3):
            notices.append(
                "The salience shown was computed for this page and differs from that of the states: they were built "
                "with other SAEs, another backbone or other settings."
            )
        return notices


def write_page(
    inspection: Inspection,
    path: str | Path,
    row: Mapping[str, Any] | None = None,
    names: Mapping[int, Mapping[int, Explanation]] | None = None,
    *,
    features: int | None = 12,
    per_feature: int = 4,
    index: str | None = None,
) -> Path:
    """Write the page of a question: one HTML file that needs nothing else.

    Args:
        row: what the index shows of it, which `page_row` reads back.
        names: explanations of features by layer, as far as there are.
        features: shown of each token and layer; None: all that are active. per_feature: examples of each.
        index: file name of an index page beside this one, to be linked.
    """
    trace, state, question = inspection.trace, inspection.state, inspection.question
    codes, units = trace.codes, utf16(trace.codes.text)
    spans = np.asarray(codes.spans, dtype=np.int64).reshape(-1, 2)
    # offsets count UTF-16 units of x0's text
    data = {
        "row": row,
        "levels": {level: _level(inspection.record.level(level)) for level in LEVELS},
        "turns": len(state.turns),
        "tokens": {
            "start": units[spans[:, 0]].tolist(),
            "end": units[spans[:, 1]].tolist(),
            "turn": codes.turn.tolist(),
            "part": codes.part.tolist(),
            "r": _numbers(trace.combined),
            "s": _numbers(trace.smoothed),
        },
        "layers": [_layer(trace, layer, (names or {}).get(layer, {}), features, per_feature) for layer in codes.layers],
        "context": CONTEXT,
    }
    html = page(
        _PACKAGE,
        "page.html.j2",
        *("page.css", "dialogue.js", "panel.js", "page.js"),
        data=data,
        pictures=inspection.pixels,
        title=f"Grounding of {question.id}",
        inspection=inspection,
        question=question,
        options=[(LETTERS[n], text, LETTERS[n] in question.answers) for n, text in enumerate(question.options)],
        missing=[state.dialogue.turns[n] for n in inspection.gold_positions if n not in set(state.positions)],
        tokens=int(codes.turn_tokens.sum()),
        marked_tokens=int(codes.turn_tokens[sorted(inspection.marked)].sum()),
        turns=_turns(inspection),
        index=index,
    )
    write_text(path, html)
    return Path(path).absolute()


def index_row(inspection: Inspection, name: str) -> dict[str, Any]:
    """What the index shows of a question.

    Args:
        name: file name of its page.

    Returns:
        Among others `gold`, `held`, `marked`: gold evidence turns in all, in x0, and inside blocks; `correct`: by
        level whether the model's answer is, None where only a judge could tell.
    """
    question = inspection.question
    kinds = [question.format, question.dimension, None if question.category is None else str(question.category)]
    if inspection.kind is not None:
        kinds.append(f"taken for {inspection.kind}")
    return {
        "href": quote(name),
        "id": question.id,
        "dialogue": question.dialogue_id,
        "kind": " · ".join(kind.replace("_", " ") for kind in kinds if kind),
        "text": question.text,
        "turns": len(inspection.state.turns),
        "blocks": len(inspection.blocks),
        "gold": len(inspection.gold_positions),
        "held": len(inspection.gold),
        "marked": len(inspection.gold & inspection.marked),
        "correct": {level: answer.correct for level, answer in inspection.answers.items()},
    }


def page_row(path: Path) -> dict[str, Any]:
    """The row of the index that a page was written with. Raises DataError for another file."""
    try:
        return dict(data_of(path.read_text(encoding="utf-8"))["row"])
    except (ValueError, TypeError, KeyError):
        raise DataError("no page of a question with its row of the index", path) from None


def write_index(rows: Sequence[Mapping[str, Any]], path: str | Path, states: str, questions: int) -> Path:
    """Write the list of rows from `index_row`; their pages are expected beside it.

    Args:
        questions: that are to have a page in the end.
    """
    total = sum(row["gold"] for row in rows)
    html = page(
        _PACKAGE,
        "index.html.j2",
        title="Grounding, question by question",
        rows=rows,
        questions=questions,
        levels=sorted({level for row in rows for level in row["correct"]}),
        states=states,
        held=sum(row["held"] for row in rows) / total if total else None,
        marked=sum(row["marked"] for row in rows) / total if total else None,
    )
    write_text(path, html)
    return Path(path).absolute()


def _layer(
    trace: GroundingTrace, layer: int, names: Mapping[int, Explanation], features: int | None, per_feature: int
) -> dict[str, Any]:
    codes, v = trace.codes.layers[layer].dialogue, trace.guidance[layer].float()
    values, indices = codes.values.float().numpy(), codes.indices.numpy()
    width = min(codes.k, features or codes.k)
    # of each token those features that add most to its resonance, then those with the largest activations
    order = np.lexsort((indices, -values, -values * v.numpy()[indices]), axis=-1)[:, :width]
    activations, shown = np.take_along_axis(values, order, -1), np.take_along_axis(indices, order, -1)
    shown = np.where(activations > 0, shown, -1)
    carried = [trace.top_features(layer, turn, CARRIED) for turn in range(len(trace.state.factual.turns))]
    guiding = [feature for feature, _ in trace.guiding_features(layer, GUIDING)]
    # the page numbers the features it shows
    named = [*guiding, *(feature for row in carried for feature, _ in row)]
    used = np.union1d(shown[shown >= 0], np.asarray(named, dtype=np.int64))
    number = {feature: place for place, feature in enumerate(used.tolist())}
    examples, fired = dialogue_examples(values, indices, trace.codes.turn.numpy(), used, per_feature)
    return {
        "layer": layer,
        "r": _numbers(trace.resonance[layer]),
        "local": _numbers(local_alignment(codes, trace.guidance[layer])),
        "active": (values > 0).sum(-1).tolist(),
        "features": [[number[feature] for feature in row if feature >= 0] for row in shown.tolist()],
        "values": [[round(value, 5) for value in row if value > 0] for row in activations.tolist()],
        "ids": used.tolist(),
        "names": [str(names[feature]) if feature in names else None for feature in number],
        "v": _numbers(v[used]),
        "fired": fired,
        "examples": examples,
        "carried": [[[number[feature], round(share, 5)] for feature, share in row] for row in carried],
        "guiding": [number[feature] for feature in guiding],
    }


def _numbers(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def _level(rendered: Rendered) -> dict[str, Any]:
    units = utf16(rendered.text)

    def spans(pairs: Sequence[Span]) -> list[int]:
        return [int(units[end]) for pair in pairs for end in pair]

    return {
        "text": rendered.text,
        "markers": spans(rendered.markers),
        "strategy": spans((*rendered.reasoning, *rendered.anchors)),
    }


def _turns(inspection: Inspection) -> list[dict[str, Any]]:
    rendered, salience = inspection.record.x0, inspection.trace.state.salience
    text, units = rendered.text, utf16(rendered.text)
    opening = {start: n for n, (start, _) in enumerate(inspection.blocks, start=1)}
    closing = {end for _, end in inspection.blocks}
    gold, marked = inspection.gold, inspection.marked
    finite = [0.0, *filter(math.isfinite, salience)]
    low, high = min(finite), max(finite)
    scale = 100 / (high - low) if high > low else 0.0
    rows, before = [], rendered.dialogue[0]

    def piece(kind: str, start: int, end: int) -> dict[str, Any]:
        return {"kind": kind, "start": int(units[start]), "end": int(units[end]), "text": text[start:end]}

    for n, (span, turn) in enumerate(zip(rendered.turns, inspection.state.turns, strict=True)):
        value = salience[n] if math.isfinite(salience[n]) else None
        # bars begin at 0, which lies inside the box where some values are negative
        left, right = sorted((0.0, value or 0.0))
        rows.append(
            {
                "n": n,
                "heads": [line for line in text[before : span.start].splitlines() if line.strip()],
                "speaker": piece("who", *span.speaker),
                "said": piece("said", *span.text),
                "captions": [piece("caption", text.rindex("\n", 0, a) + 1, b) for a, b in span.captions],
                "pictures": [
                    thumbnail(image.path, PICTURE_SIZE) if inspection.pixels and image.path is not None else None
                    for image in turn.images
                ],
                "gold": n in gold,
                "marked": n in marked,
                "opens": opening.get(n),
                "closes": n in closing,
                "salience": value,
                "left": round((left - low) * scale, 2),
                "width": round((right - left) * scale, 2),
            }
        )
        before = span.end
    return rows


def dialogue_examples(
    values: Array, indices: Array, turn: Array, features: Array, most: int
) -> tuple[list[list[tuple[int, str]]], list[int]]:
    """The tokens of the dialogue on which features fire most strongly, at most one per turn.

    Args:
        values, indices: sparse codes, [T, k]. turn: turn of each token, [T], ascending.
        features: those wanted. most: examples of each.

    Returns:
        For each feature its examples by falling activation (ties: the earlier token first), and the number of tokens
        it fires on. An example is its peak token and a string of digits, the activations from `CONTEXT` tokens before
        the peak to `CONTEXT` after it inside its turn, relative to the feature's largest.
    """
    fires: dict[int, dict[int, float]] = {feature: {} for feature in features.tolist()}
    for t, pairs in enumerate(zip(indices.tolist(), values.tolist(), strict=True)):
        for feature, value in zip(*pairs, strict=True):
            if value > 0 and feature in fires:
                fires[feature][t] = value
    examples = []
    for activation in fires.values():
        peaks: dict[int, int] = {}
        for t in sorted(activation, key=lambda t: (-activation[t], t)):
            peaks.setdefault(int(turn[t]), t)
        rows = []
        for peak in islice(peaks.values(), most):
            near = range(max(0, peak - CONTEXT), min(len(turn), peak + CONTEXT + 1))
            around = [activation.get(t, 0.0) for t in near if turn[t] == turn[peak]]
            rows.append((peak, digits(around, max(activation.values()))))
        examples.append(rows)
    return examples, [len(activation) for activation in fires.values()]


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
        kept, index, rows = sum(page.exists() for page in pages.values()), out / "index.html", []
        inspector = Inspector(cfg, built)
        for record in track(records, "pages", len(records)):
            page = pages[record.question_id]
            rows.append(page_row(page) if page.exists() else inspector.write(record, page, index.name))
            write_index(rows, index, str(cfg.states), len(records))
    told = f", {kept} of them from before" if kept else ""
    print(f"{len(rows)} page{'' if len(rows) == 1 else 's'}{told}: {index}")
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
        # what a manifest names is not fetched from anywhere
        if cfg.sae is None and folder is not None and not Path(str(folder).partition(":")[0]).exists():
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
            record,
            None if self.model is None else self.model.name,
            {} if self.model is None else {level: self._answer(record, question, level) for level in LEVELS},
            self.grounder.pictures is not None,
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
