"""The page of one question, and the index of many."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from remind.core.files import write_text
from remind.data.dialogue import Image
from remind.grounding.resonance import local_alignment
from remind.models.images import thumbnail
from remind.states import prompts
from remind.states.pyramid import LETTERS, Rendered, Span
from remind.viewing.inspector.inspection import CONTEXT, Inspection, dialogue_examples, features_per_token
from sae.pages import Snippets, packed, page, utf16

if TYPE_CHECKING:
    from remind.viewing.explanations import Explanation
    from sae.probe import TopExamples

#: Features named for a turn, and for the whole guidance.
CARRIED, GUIDING = 5, 12
#: Longer side of an image in the page, in pixels.
PICTURE_SIZE = 240
_PACKAGE = "remind.viewing.inspector"


def write_page(
    inspection: Inspection,
    path: str | Path,
    *,
    examples: Mapping[int, TopExamples] | None = None,
    names: Mapping[int, Mapping[int, Explanation]] | None = None,
    features: int | None = 12,
    per_feature: int = 4,
    index: str | None = None,
) -> Path:
    """Write the page of a question: one HTML file that needs nothing else.

    Args:
        examples: by layer, from a corpus; None: taken from the retrieved dialogue itself.
        names: explanations of features by layer, as far as there are.
        features: shown of each token and layer; None: all that are active. per_feature: examples of each.
        index: file name of an index page beside this one, to be linked.
    """
    html = page(
        _PACKAGE,
        "page.html.j2",
        "page.css",
        "dialogue.js",
        "panel.js",
        "page.js",
        title=f"Grounding of {inspection.question.id}",
        pictures=inspection.pixels,
        data=page_data(inspection, examples, features, per_feature, names or {}),
        **_template_values(inspection),
        index=index,
    )
    write_text(path, html)
    return Path(os.path.abspath(path))


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
    if (inferred := inspection.kind) is not None:
        kinds.append(f"taken for {inferred}")
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


def write_index(rows: Sequence[Mapping[str, Any]], path: str | Path, states: str) -> Path:
    """Write the list of rows from `index_row`; their pages are expected beside it."""
    total = sum(row["gold"] for row in rows)
    html = page(
        _PACKAGE,
        "index.html.j2",
        title="Grounding, question by question",
        rows=rows,
        levels=sorted({level for row in rows for level in row["correct"]}),
        states=states,
        held=sum(row["held"] for row in rows) / total if total else None,
        marked=sum(row["marked"] for row in rows) / total if total else None,
    )
    write_text(path, html)
    return Path(os.path.abspath(path))


def page_data(
    inspection: Inspection,
    examples: Mapping[int, TopExamples] | None = None,
    features: int | None = 12,
    per_feature: int = 4,
    names: Mapping[int, Mapping[int, Explanation]] | None = None,
) -> dict[str, Any]:
    """The JSON values that the script of the page reads. Offsets count UTF-16 units of x0's text."""
    trace = inspection.trace
    codes = trace.codes
    units = utf16(codes.text)
    spans = np.asarray(codes.spans, dtype=np.int64).reshape(-1, 2)
    snippets = Snippets()
    layers = []
    for layer in codes.layers:
        corpus = None if examples is None else examples[layer]
        layers.append(_layer(inspection, layer, corpus, snippets, features, per_feature))
        found = (names or {}).get(layer, {})
        layers[-1]["names"] = [str(found[feature]) if feature in found else None for feature in layers[-1]["ids"]]
    return {
        "levels": {name: _level(rendered) for name, rendered in inspection.levels.items()},
        "turns": len(inspection.state.turns),
        "tokens": {
            "start": packed(units[spans[:, 0]], "u4"),
            "end": packed(units[spans[:, 1]], "u4"),
            "turn": packed(codes.turn.numpy(), "u4"),
            "part": packed(codes.part.numpy(), "u1"),
            "r": packed(trace.combined.float().numpy(), "f4"),
            "s": packed(trace.smoothed.float().numpy(), "f4"),
        },
        "layers": layers,
        "context": CONTEXT,
        "snippets": None if examples is None else snippets.rows,
    }


def _layer(
    inspection: Inspection,
    layer: int,
    corpus: TopExamples | None,
    snippets: Snippets,
    features: int | None,
    per_feature: int,
) -> dict[str, Any]:
    trace = inspection.trace
    codes, v = trace.codes.layers[layer].dialogue, trace.guidance[layer].float()
    values, indices = codes.values.float().numpy(), codes.indices.numpy()
    width = min(codes.k, features or codes.k)
    shown, activations = features_per_token(values, indices, values * v.numpy()[indices], width)
    carried = [trace.top_features(layer, turn, CARRIED) for turn in range(len(inspection.state.turns))]
    guiding = [feature for feature, _ in trace.guiding_features(layer, GUIDING)]
    # the page numbers the features it shows
    named = {feature for row in carried for feature, _ in row}.union(guiding)
    used = np.union1d(shown[shown >= 0], np.asarray(sorted(named), dtype=np.int64))
    number = {feature: place for place, feature in enumerate(used.tolist())}
    kind = "u2" if len(used) < 1 << 16 else "u4"
    examples: list[Any]
    examples, fired = dialogue_examples(values, indices, trace.codes.turn.numpy(), used, per_feature)
    density = None
    if corpus is not None:
        examples = [snippets.of_feature(corpus, feature, per_feature) for feature in number]
        density = [round(int(corpus.fired[feature]) / max(corpus.n_tokens, 1), 7) for feature in number]
    return {
        "layer": layer,
        "width": width,
        "kind": kind,
        "r": packed(trace.resonance[layer].float().numpy(), "f4"),
        "local": packed(local_alignment(codes, trace.guidance[layer]).float().numpy(), "f4"),
        "active": packed((values > 0).sum(-1), "u2"),
        # 0 is no feature
        "features": packed(np.where(shown >= 0, np.searchsorted(used, shown) + 1, 0), kind),
        "values": packed(activations, "f4"),
        "ids": used.tolist(),
        "v": packed(v.numpy()[used], "f4"),
        "fired": fired,
        "density": density,
        "examples": examples,
        "carried": [[[number[feature], round(share, 5)] for feature, share in row] for row in carried],
        "guiding": [number[feature] for feature in guiding],
    }


def _level(rendered: Rendered) -> dict[str, Any]:
    units = utf16(rendered.text)

    def spans(pairs: Sequence[Span]) -> list[int]:
        return [int(units[end]) for pair in pairs for end in pair]

    return {
        "text": rendered.text,
        "markers": spans(rendered.markers),
        "strategy": spans((*rendered.reasoning, *rendered.anchors)),
    }


def _template_values(inspection: Inspection) -> dict[str, Any]:
    """What the page shows without its script."""
    state, question, levels = inspection.state, inspection.question, inspection.levels
    gold, marked = inspection.gold, inspection.marked
    tokens = inspection.trace.codes.turn_tokens
    retrieved = set(state.positions)
    return {
        "inspection": inspection,
        "question": question,
        "options": [(LETTERS[n], text, LETTERS[n] in question.answers) for n, text in enumerate(question.options)],
        "missing": [state.dialogue.turns[place] for place in inspection.gold_positions if place not in retrieved],
        "counts": {
            "gold": len(inspection.gold_positions),
            "held": len(gold),
            "marked_gold": len(gold & marked),
            "turns": len(state.turns),
            "of": len(state.dialogue.turns),
            "marked": len(marked),
            "tokens": int(tokens.sum()),
            "marked_tokens": int(tokens[sorted(marked)].sum()),
            "budget": inspection.trace.budget,
        },
        "reflection": _summary(levels["x1"].text, levels["x2"].text) if "x2" in levels else None,
        "turns": _turns(inspection),
        "overview": _overview(inspection),
    }


def _summary(x1: str, x2: str) -> str:
    """What x2 has between the beginning and the end that it shares with x1, without the words that introduce it."""
    start = _shared(x1, x2)
    end = _shared(x1[start:][::-1], x2[start:][::-1])
    text = x2[start : len(x2) - end].strip()
    return text.removeprefix("Reflection").strip().removeprefix(prompts.render("summary").strip()).strip()


def _shared(first: str, second: str) -> int:
    """Length of the beginning that both have."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))


def _thumbnail(image: Image) -> str | None:
    return None if image.path is None else thumbnail(image.path, PICTURE_SIZE)


def _turns(inspection: Inspection) -> list[dict[str, Any]]:
    rendered, salience = inspection.levels["x0"], inspection.trace.state.salience
    text, units = rendered.text, utf16(rendered.text)
    opening = {start: n for n, (start, _) in enumerate(inspection.blocks, start=1)}
    closing = {end for _, end in inspection.blocks}
    gold, marked = inspection.gold, inspection.marked
    low, high = _range(salience)
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
                "pictures": [_thumbnail(image) if inspection.pixels else None for image in turn.images],
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


def _overview(inspection: Inspection) -> dict[str, Any]:
    """SVG paths of the strip that shows all turns at once, in a box one unit wide per turn and 100 high."""
    salience, turns = inspection.trace.state.salience, inspection.state.turns
    low, high = _range(salience)
    scale = 84 / (high - low) if high > low else 0.0
    zero = 86 + low * scale
    bars = [f"M{n} {zero:.1f}h1v{-s * scale if math.isfinite(s) else 0.0:.1f}h-1z" for n, s in enumerate(salience)]
    sessions = [inspection.state.dialogue.session_of[turn.id].id for turn in turns]
    return {
        "n": max(1, len(turns)),
        "zero": round(zero, 1),
        "plain": "".join(bar for n, bar in enumerate(bars) if n not in inspection.marked),
        "marked": "".join(bar for n, bar in enumerate(bars) if n in inspection.marked),
        "blocks": "".join(f"M{start} 0h{end + 1 - start}v100h-{end + 1 - start}z" for start, end in inspection.blocks),
        "gold": sorted(inspection.gold),
        "sessions": [n for n in range(1, len(turns)) if sessions[n] != sessions[n - 1]],
    }


def _range(salience: Sequence[float]) -> tuple[float, float]:
    """The least and the largest finite value, and 0."""
    finite = [value for value in salience if math.isfinite(value)]
    return min([0.0, *finite]), max([0.0, *finite])
