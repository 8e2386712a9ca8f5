"""The page of one question."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from remind.core.files import write_text
from remind.grounding.features import flat
from remind.grounding.resonance import local_alignment
from remind.states import prompts
from remind.states.pyramid import LETTERS, Rendered, Span
from remind.viewing.inspector.collect import Inspection
from remind.viewing.inspector.features import (
    CONTEXT,
    Array,
    active_pairs,
    carried_turns,
    dialogue_examples,
    kept_per_token,
)
from sae.pages import Snippets, packed, page, utf16

if TYPE_CHECKING:
    from sae.probe import TopExamples

#: Features named for a turn, and for the whole guidance.
CARRIED, GUIDING = 5, 12


def write_page(
    inspection: Inspection,
    path: str | Path,
    *,
    examples: Mapping[int, TopExamples] | None = None,
    features: int | None = 12,
    per_feature: int = 4,
    index: str | None = None,
) -> Path:
    """Write the page of a question: one HTML file that needs nothing else.

    Args:
        examples: by layer, from a corpus; None: looked for in the retrieved dialogue itself.
        features: shown of each token and layer; None: all that are active. per_feature: examples of each.
        index: file name of an index page beside this one, to be linked.
    """
    html = page(
        "remind.viewing.inspector",
        "page.html.j2",
        scripts=[("remind.viewing.inspector", name) for name in ("dialogue.js", "panel.js", "page.js")],
        styles=[("remind.viewing.inspector", "page.css")],
        data=page_data(inspection, examples, features, per_feature),
        **_shown(inspection),
        index=index,
    )
    write_text(path, html)
    return Path(os.path.abspath(path))


def page_data(
    inspection: Inspection,
    examples: Mapping[int, TopExamples] | None = None,
    features: int | None = 12,
    per_feature: int = 4,
) -> dict[str, Any]:
    """What the script of the page reads, as JSON values. Offsets count UTF-16 units of x0's text."""
    trace = inspection.trace
    codes = trace.codes
    units = utf16(codes.text)
    spans = np.asarray(codes.spans, dtype=np.int64).reshape(-1, 2)
    snippets = None if examples is None else Snippets()
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
        "layers": [_layer(inspection, layer, examples, snippets, features, per_feature) for layer in codes.layers],
        "context": CONTEXT,
        "snippets": None if snippets is None else snippets.rows,
    }


def _layer(
    inspection: Inspection,
    layer: int,
    examples: Mapping[int, TopExamples] | None,
    snippets: Snippets | None,
    features: int | None,
    per_feature: int,
) -> dict[str, Any]:
    trace = inspection.trace
    codes, v = trace.codes.layers[layer].dialogue, trace.guidance[layer]
    turn = trace.codes.turn.numpy()
    pairs = active_pairs(codes, v)
    width = min(codes.k, features or codes.k)
    kept, values = kept_per_token(pairs, len(turn), width)
    carried = carried_turns(pairs, turn, len(inspection.state.turns), CARRIED)
    guiding = trace.guiding_features(layer, GUIDING)
    named = {feature for row in carried for feature, _ in row} | {feature for feature, _ in guiding}
    used = np.union1d(kept[kept >= 0], np.asarray(sorted(named), dtype=np.int64))
    local = np.searchsorted(used, kept)
    kind = "u2" if len(used) < 1 << 16 else "u4"
    here, fired = dialogue_examples(pairs, turn, used, per_feature)
    number = {int(feature): place for place, feature in enumerate(used)}
    shown: list[Any] = [here[int(feature)] for feature in used]
    if examples is not None and snippets is not None:
        shown = [snippets.of_feature(examples[layer], int(feature), per_feature) for feature in used]
    active = flat(codes)[0] > 0
    return {
        "layer": layer,
        "k": codes.k,
        "width": width,
        "kind": kind,
        "r": packed(trace.resonance[layer].float().numpy(), "f4"),
        "local": packed(local_alignment(codes, v).float().numpy(), "f4"),
        "active": packed(active.sum(-1).numpy(), "u2"),
        # 0 is no feature
        "features": packed(np.where(kept >= 0, local + 1, 0), kind),
        "values": packed(values, "f4"),
        "ids": used.tolist(),
        "v": packed(v.float().numpy()[used], "f4"),
        "fired": [fired[int(feature)] for feature in used],
        "density": None if examples is None else _densities(examples[layer], used),
        "examples": shown,
        "carried": [[[number[feature], round(share, 5)] for feature, share in row] for row in carried],
        "guiding": [number[feature] for feature, _ in guiding],
    }


def _densities(examples: TopExamples, used: Array) -> list[float]:
    return [round(float(examples.fired[int(j)]) / max(examples.n_tokens, 1), 7) for j in used]


def _level(rendered: Rendered) -> dict[str, Any]:
    units = utf16(rendered.text)

    def spans(pairs: Sequence[Span]) -> list[int]:
        return [int(units[end]) for pair in pairs for end in pair]

    return {
        "text": rendered.text,
        "markers": spans(rendered.markers),
        "strategy": spans((*rendered.reasoning, *rendered.anchors)),
    }


def _shown(inspection: Inspection) -> dict[str, Any]:
    """What the template shows without any script."""
    trace, state, question = inspection.trace, inspection.state, inspection.question
    levels = inspection.levels
    gold, marked, wanted = inspection.gold, inspection.marked, inspection.wanted
    tokens = trace.codes.turn_tokens
    held = {turn.id for turn in state.turns}
    return {
        "question": question,
        "split": inspection.split,
        "options": [(LETTERS[n], text, LETTERS[n] in question.answers) for n, text in enumerate(question.options)],
        "missing": [state.dialogue.turn(turn_id) for turn_id in wanted if turn_id not in held],
        "counts": {
            "gold": len(wanted),
            "held": len(gold),
            "marked_gold": len(gold & marked),
            "turns": len(state.turns),
            "of": len(state.dialogue.turns),
            "marked": len(marked),
            "tokens": int(tokens.sum()),
            "marked_tokens": int(tokens[sorted(marked)].sum()),
            "budget": trace.budget,
            "features": sum(one.dialogue.k for one in trace.codes.layers.values()),
        },
        "layers": list(trace.codes.layers),
        "notices": inspection.notices,
        "strategy": state.strategy,
        "levels": list(levels),
        "reflection": reflection(levels["x1"].text, levels["x2"].text) if "x2" in levels else None,
        "blocks": inspection.blocks,
        "model": inspection.model,
        "answers": inspection.answers,
        "turns": _turns(inspection),
        "overview": _overview(inspection),
    }


def reflection(x1: str, x2: str) -> str:
    """The summary that x2 adds, less the fixed words that introduce it."""
    return added(x1, x2).removeprefix("Reflection").strip().removeprefix(prompts.render("summary").strip()).strip()


def added(shorter: str, longer: str) -> str:
    """What stands in the longer text between the beginning and the end it shares with the shorter."""
    start = _shared(shorter, longer)
    tail = _shared(reversed(shorter[start:]), reversed(longer[start:]))
    return longer[start : len(longer) - tail].strip()


def _shared(first: Iterable[str], second: Iterable[str]) -> int:
    """Length of the beginning that both have."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _turns(inspection: Inspection) -> list[dict[str, Any]]:
    rendered = inspection.levels["x0"]
    text, units = rendered.text, utf16(rendered.text)
    starts = {start: n for n, (start, _) in enumerate(inspection.blocks, start=1)}
    ends = {end for _, end in inspection.blocks}
    gold, marked = inspection.gold, inspection.marked
    bars = _bars(inspection.trace.state.salience)
    found, before = [], rendered.dialogue[0]

    def piece(kind: str, start: int, end: int) -> dict[str, Any]:
        return {"kind": kind, "start": int(units[start]), "end": int(units[end]), "text": text[start:end]}

    for n, span in enumerate(rendered.turns):
        captions = []
        for start, end in span.captions:
            captions.append(piece("caption", text.rindex("\n", 0, start) + 1, end))
        between = [line for line in text[before : span.start].splitlines() if line.strip()]
        found.append(
            {
                "n": n,
                "id": span.turn_id,
                "heads": between,
                "speaker": piece("who", *span.speaker),
                "said": piece("said", *span.text),
                "captions": captions,
                "gold": n in gold,
                "marked": n in marked,
                "opens": starts.get(n),
                "closes": n in ends,
                **bars[n],
            }
        )
        before = span.end
    return found


def _bars(salience: Sequence[float]) -> list[dict[str, Any]]:
    """Each turn's bar in percent of the width; bars start at 0, which lies inside where some are negative."""
    finite = [value for value in salience if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    scale = 100 / (high - low) if high > low else 0.0
    rows = []
    for value in salience:
        known = math.isfinite(value)
        left, right = (sorted((0.0, value))) if known else (0.0, 0.0)
        rows.append(
            {
                "salience": value if known else None,
                "left": round((left - low) * scale, 2),
                "width": round((right - left) * scale, 2),
            }
        )
    return rows


def _overview(inspection: Inspection) -> dict[str, Any]:
    """Paths of the strip that shows all turns at once, in a box of one unit per turn and a height of 100."""
    finite = torch.tensor([s if math.isfinite(s) else 0.0 for s in inspection.trace.state.salience])
    low, high = min(0.0, float(finite.min())) if len(finite) else 0.0, float(finite.max()) if len(finite) else 1.0
    scale = 84 / (max(high, 0.0) - low) if high > low else 0.0
    zero = 86 + low * scale
    paths: dict[str, list[str]] = {"plain": [], "marked": []}
    for n, value in enumerate(finite.tolist()):
        name = "marked" if n in inspection.marked else "plain"
        paths[name].append(f"M{n} {zero:.1f}h1v{-value * scale:.1f}h-1z")
    return {
        "n": max(1, len(finite)),
        "zero": round(zero, 1),
        "plain": "".join(paths["plain"]),
        "marked": "".join(paths["marked"]),
        "blocks": "".join(f"M{start} 0h{end + 1 - start}v100h-{end + 1 - start}z" for start, end in inspection.blocks),
        "gold": sorted(inspection.gold),
        "sessions": [n for n, turn in enumerate(_sessions(inspection)) if turn],
    }


def _sessions(inspection: Inspection) -> list[bool]:
    """Whether each shown turn is the first of its session here."""
    of = inspection.state.dialogue.session_of
    ids = [of[turn.id].id for turn in inspection.state.turns]
    return [n > 0 and ids[n] != ids[n - 1] for n in range(len(ids))]
