"""The retrieved dialogue as grounding saw it: tokens by resonance, blocks, gold evidence."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby

from remind.core.errors import DataError
from remind.grounding.places import Part
from remind.grounding.trace import GroundingTrace
from remind.states.parquet import StateRecord
from remind.states.pyramid import LEVELS, Span
from remind.viewing.page import BLUE, Page, heading, paragraph, shaded


def show_dialogue(trace: GroundingTrace, layer: int | None = None, most: int | None = None) -> Page:
    """The retrieved turns, each token shaded by its resonance r_t (Eq. 4); marked turns have a bar, gold evidence a ▾.

    Shades run from the median to the largest; what does not count for salience (speakers, headers) is not shaded. A
    tooltip has the number, and the turn's salience stands behind its id.

    Args:
        layer: its resonance alone; None: what all layers agree on.
        most: show only so many turns, the most salient ones, in the order of the dialogue.

    Raises:
        DataError: a layer without an SAE.
    """
    factual = trace.state.factual
    if layer is not None and layer not in trace.resonance:
        raise DataError(f"layer {layer} has no SAE here; there are {', '.join(map(str, trace.resonance))}")
    values = trace.combined if layer is None else trace.resonance[layer]
    counted = [part in (Part.TEXT, Part.CAPTION) for part in trace.codes.part.tolist()]
    own = sorted(float(value) for value, counts in zip(values, counted, strict=True) if counts)
    low, high = (own[len(own) // 2], own[-1]) if own else (0.0, 1.0)
    shade = [
        (float(value) - low) / ((high - low) or 1.0) if counts else 0.0
        for value, counts in zip(values, counted, strict=True)
    ]
    question = factual.question
    gold = set(question.evidence) | {
        turn.id for turn in factual.turns if question.visual and any(i.index in question.images for i in turn.images)
    }
    marked = {index for start, end in trace.state.blocks for index in range(start, end + 1)}
    order = sorted(range(len(factual.turns)), key=lambda index: -trace.state.salience[index])
    shown = set(order if most is None else order[:most])
    lines, words, last = [heading(question.text)], [question.text], None
    scored = zip(trace.codes.turn.tolist(), trace.codes.spans, values.tolist(), shade, strict=True)
    for index, group in groupby(scored, key=lambda item: item[0]):
        if index not in shown:
            continue
        if last is not None and (index != last + 1 or factual.runs[index] != factual.runs[last]):
            lines.append(paragraph("…", faint=True))
        last = index
        turn, pieces = factual.turns[index], _pieces(trace.codes.text, group)
        body = shaded(pieces).rstrip()
        flag = " ▾" if turn.id in gold else ""
        salience = f"{trace.state.salience[index]:.2f}"
        note = f'<span style="opacity:.55;font-size:80%">{escape(turn.id)} {salience}{flag}</span>'
        lines.append(paragraph(f"{note} {body}", index in marked))
        plain = "".join(text for text, _, _ in pieces).strip()
        words.append(f"{'*' if index in marked else ' '} {turn.id} {salience}{flag} {plain}")
    return Page(f'<div style="max-width:60em">{"".join(lines)}</div>', "\n".join(words))


def _pieces(text: str, tokens: Iterable[tuple[int, Span, float, float]]) -> list[tuple[str, float, str]]:
    pieces, cursor = [], -1
    for _, (start, end), value, shade in tokens:
        # the tokens of a character of several bytes all cover it
        start = max(start, cursor)
        if start < end:
            pieces.append((text[start:end], shade, f"{value:.3g}" if shade else ""))
            cursor = end
    return pieces


def show_levels(record: StateRecord) -> Page:
    """x0, x1 and x2 of a question under one another: what each adds to the one before it is shaded.

    Only the part from the dialogue on, which differs; the instructions are the same.
    """
    parts, words = [], []
    before: list[str] = []
    for level in LEVELS:
        rendered = record.level(level)
        text = rendered.text[rendered.dialogue[0] :].strip()
        lines = text.split("\n")
        new = _added(before, lines)
        body = shaded(((f"{line}\n", 0.6 if fresh and before else 0.0, "") for line, fresh in new), BLUE)
        parts.append(
            f"<details{' open' if level == 'x1' else ''}><summary>{level}</summary>{paragraph(body)}</details>"
        )
        words.append(f"--- {level}\n{text}")
        before = lines
    return Page(f'<div style="max-width:60em">{"".join(parts)}</div>', "\n".join(words))


def _added(before: list[str], after: list[str]) -> list[tuple[str, bool]]:
    from difflib import SequenceMatcher

    kept: set[int] = set()
    for block in SequenceMatcher(a=before, b=after, autojunk=False).get_matching_blocks():
        kept.update(range(block.b, block.b + block.size))
    return [(line, number not in kept) for number, line in enumerate(after)]
