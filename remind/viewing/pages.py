"""Pages of shaded tokens for notebooks: the retrieved dialogue as grounding saw it, the three states of a question.

As in `sae.pages`, markupsafe escapes: a `str` is text, only `Markup` is HTML. Nothing in these pages runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from remind.core.errors import DataError
from remind.data.dialogue import Question, Turn
from remind.states.pyramid import Span
from remind.states.records import StateRecord, record_of_row

if TYPE_CHECKING:
    from remind.grounding.ground import GroundingTrace

#: R, G, B of shades. They are laid over the page's own colours, so that text is readable in dark and light themes.
ORANGE, BLUE = (230, 159, 0), (0, 114, 178)


class Page:
    """HTML that a notebook shows as the value of a cell.

    Attributes:
        html: the HTML.
        text: the same as plain text, for a terminal.
    """

    def __init__(self, html: Markup, text: str) -> None:
        self.html, self.text = str(html), text

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def shaded(pieces: Iterable[tuple[str, float, str]], colour: tuple[int, int, int] = ORANGE) -> Markup:
    """Pieces of text on backgrounds as strong as their shade.

    Args:
        pieces: text, shade from 0 to 1, and tooltip ("": none).
    """
    spans = []
    for text, shade, tooltip in pieces:
        opacity = min(1.0, max(0.0, shade)) * 0.65
        attributes = Markup()
        if opacity > 0.01:
            style = ' style="background:rgba({},{},{},{:.2f});border-radius:2px"'
            attributes += Markup(style).format(*colour, opacity)
        if tooltip:
            attributes += Markup(' title="{}"').format(tooltip)
        spans.append(Markup("<span{}>{}</span>").format(attributes, text) if attributes else escape(text))
    return Markup().join(spans)


def paragraph(content: str, marked: bool = False, faint: bool = False) -> Markup:
    """A line of a dialogue, with a bar at its side where it is marked."""
    edge = "3px solid " + ("rgb(230,159,0)" if marked else "transparent")
    style = f"border-left:{edge};padding:1px 0 1px 8px;margin:0;white-space:pre-wrap;unicode-bidi:plaintext"
    return Markup('<p style="{}{}">{}</p>').format(style, ";opacity:.6" if faint else "", content)


def heading(text: str) -> Markup:
    return Markup('<p style="margin:8px 0 4px;font-weight:600;unicode-bidi:plaintext">{}</p>').format(text)


def column(parts: Iterable[Markup]) -> Markup:
    """Parts below one another, no wider than is comfortable to read."""
    return Markup('<div style="max-width:60em">{}</div>').format(Markup().join(parts))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Markup:
    """A table whose last column alone breaks its lines."""

    def row(tag: str, cells: Sequence[str]) -> Markup:
        wraps = ["nowrap"] * (len(cells) - 1) + ["normal"]
        cell = f'<{tag} style="text-align:left;vertical-align:top;padding:2px 12px 2px 0;white-space:{{}}">{{}}</{tag}>'
        return Markup("<tr>{}</tr>").format(Markup().join(map(Markup(cell).format, wraps, cells)))

    body = Markup().join(row("td", cells) for cells in rows)
    whole = '<table style="border-collapse:collapse;font-size:90%"><thead>{}</thead><tbody>{}</tbody></table>'
    return Markup(whole).format(row("th", head), body)


def marked_turns(blocks: Iterable[Span]) -> frozenset[int]:
    """Indices of the retrieved turns inside blocks."""
    return frozenset(index for start, end in blocks for index in range(start, end + 1))


def gold_turns(question: Question, turns: Sequence[Turn]) -> tuple[int, ...]:
    """Indices of the turns that are gold evidence or, for a visual question, show a gold image."""
    images = set(question.images) if question.visual else set()
    return tuple(
        index
        for index, turn in enumerate(turns)
        if turn.id in question.evidence or any(image.index in images for image in turn.images)
    )


def show_dialogue(trace: GroundingTrace, layer: int | None = None, most: int | None = None) -> Page:
    """The retrieved turns, each token shaded by its resonance r_t (Eq. 4); marked turns have a bar, gold evidence a ▾.

    Shades run from the median to the maximum; tokens that salience does not count (speakers, headers) have none.
    Tooltips give the value, and the turn's salience follows its id.

    Args:
        layer: whose resonance is shown; None: all layers combined.
        most: show only this many turns, the most salient ones, in the order of the dialogue.

    Raises:
        DataError: a layer without an SAE.
    """
    from remind.grounding.codes import Part

    if layer is not None and layer not in trace.resonance:
        raise DataError(f"layer {layer} has no SAE here; there are {', '.join(map(str, trace.resonance))}")
    factual, salience = trace.state.factual, trace.state.salience
    values = (trace.combined if layer is None else trace.resonance[layer]).tolist()
    counted = [part in (Part.TEXT, Part.CAPTION) for part in trace.codes.part.tolist()]
    ordered = sorted(value for value, counts in zip(values, counted, strict=True) if counts)
    low, high = (ordered[len(ordered) // 2], ordered[-1]) if ordered else (0.0, 1.0)
    shades = [
        (value - low) / ((high - low) or 1.0) if counts else 0.0 for value, counts in zip(values, counted, strict=True)
    ]
    gold, marked = gold_turns(factual.question, factual.turns), marked_turns(trace.state.blocks)
    shown = set(sorted(range(len(factual.turns)), key=lambda index: -salience[index])[:most])
    parts, lines, last = [heading(factual.question.text)], [factual.question.text], None
    tokens = zip(trace.codes.turn.tolist(), trace.codes.spans, values, shades, strict=True)
    for index, group in groupby(tokens, key=lambda token: token[0]):
        if index not in shown:
            continue
        if last is not None and (index != last + 1 or factual.runs[index] != factual.runs[last]):
            parts.append(paragraph("…", faint=True))
        last = index
        pieces = _pieces(trace.codes.text, group)
        label = f"{factual.turns[index].id} {salience[index]:.2f}{' ▾' if index in gold else ''}"
        note = Markup('<span style="opacity:.55;font-size:80%">{}</span> {}')
        parts.append(paragraph(note.format(label, shaded(pieces).rstrip()), index in marked))
        text = "".join(text for text, _, _ in pieces).strip()
        lines.append(f"{'*' if index in marked else ' '} {label} {text}")
    return Page(column(parts), "\n".join(lines))


def _pieces(text: str, tokens: Iterable[tuple[int, Span, float, float]]) -> list[tuple[str, float, str]]:
    pieces, cursor = [], -1
    for _, (start, end), value, shade in tokens:
        # all tokens of a multi-byte character have its whole span
        start = max(start, cursor)
        if start < end:
            pieces.append((text[start:end], shade, f"{value:.3g}" if shade else ""))
            cursor = end
    return pieces


def show_levels(record: StateRecord | Mapping[str, Any]) -> Page:
    """x0, x1 and x2 of a question (a record, or a row of a states dataset) below one another.

    What each adds to the one before it is shaded; the instructions before the dialogue, the same in all, are left out.
    """
    record = record_of_row(record) if isinstance(record, Mapping) else record
    parts, texts = [], []
    before: list[str] = []
    for level in record.levels:
        rendered = record.level(level)
        text = rendered.text[rendered.dialogue[0] :].strip()
        lines = text.split("\n")
        matches = SequenceMatcher(a=before, b=lines, autojunk=False).get_matching_blocks()
        old = {number for match in matches for number in range(match.b, match.b + match.size)}
        shades = [0.6 if before and number not in old else 0.0 for number in range(len(lines))]
        body = shaded([(f"{line}\n", shade, "") for line, shade in zip(lines, shades, strict=True)], BLUE)
        details = Markup("<details{}><summary>{}</summary>{}</details>")
        parts.append(details.format(" open" if level == "x1" else "", level, paragraph(body)))
        texts.append(f"--- {level}\n{text}")
        before = lines
    return Page(column(parts), "\n".join(texts))
