"""What notebooks show: a dialogue as grounding saw it, the states of a question, features, their examples and search.

As in `sae.pages`, markupsafe escapes: a `str` is text, only `Markup` is HTML. Nothing in these pages runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from difflib import SequenceMatcher
from html import unescape
from itertools import groupby
from typing import Any

from markupsafe import Markup, escape
from PIL.Image import Image
from torch import Tensor

from remind.core.errors import DataError, ModelError
from remind.data.dialogue import gold_turns
from remind.grounding.codes import Part
from remind.grounding.ground import GroundingTrace
from remind.models.backbone import Backbone
from remind.models.generate import generate
from remind.states.pyramid import Span
from remind.states.records import StateRecord, record_of_row
from sae.figures import COLOURS, Picture, new_figure
from sae.probe import Encoded, Example, FeatureActivation, TopExamples, search, top_features

#: R, G, B of shades. They are laid over the page's own colours, so that text is readable in dark and light themes.
ORANGE, BLUE = (230, 159, 0), (0, 114, 178)
_HEAD = ("feature", "activation", "tokens", "peak", "elsewhere")


class Page:
    """HTML that a notebook shows as the value of a cell; a terminal shows its text, a line a paragraph or row."""

    def __init__(self, html: Markup) -> None:
        self.html = str(html)

    @property
    def text(self) -> str:
        lines = re.sub("</(?:p|tr|summary)>", "\n", re.sub("</t[dh]>", " ", self.html))
        return unescape(re.sub("<[^>]*>", "", lines)).strip()

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


def show_dialogue(trace: GroundingTrace, most: int | None = None) -> Page:
    """The retrieved turns, each token shaded by its resonance r_t (Eq. 4); marked turns have a bar, gold evidence a ▾.

    Shades run from the median to the maximum; tokens that salience does not count (speakers, headers) have none.
    Tooltips give the value, and the turn's salience follows its id.

    Args:
        most: show only this many turns, the most salient ones, in the order of the dialogue.
    """
    factual, salience = trace.state.factual, trace.state.salience
    values = trace.combined.tolist()
    counted = [part in (Part.TEXT, Part.CAPTION) for part in trace.codes.part.tolist()]
    ordered = sorted(value for value, counts in zip(values, counted, strict=True) if counts)
    low, high = (ordered[len(ordered) // 2], ordered[-1]) if ordered else (0.0, 1.0)
    shades = [
        (value - low) / ((high - low) or 1.0) if counts else 0.0 for value, counts in zip(values, counted, strict=True)
    ]
    gold, marked = gold_turns(factual.question, factual.turns), marked_turns(trace.state.blocks)
    shown = set(sorted(range(len(factual.turns)), key=lambda index: -salience[index])[:most])
    parts, last = [heading(factual.question.text)], None
    tokens = zip(trace.codes.turn.tolist(), trace.codes.spans, values, shades, strict=True)
    for index, group in groupby(tokens, key=lambda token: token[0]):
        if index not in shown:
            continue
        if last is not None and (index != last + 1 or factual.runs[index] != factual.runs[last]):
            parts.append(paragraph("…", faint=True))
        last = index
        rest = [one[1:] for one in group]
        label = f"{factual.turns[index].id} {salience[index]:.2f}{' ▾' if index in gold else ''}"
        note = Markup('<span style="opacity:.55;font-size:80%">{}</span> {}')
        text = shaded(_pieces(trace.codes.text, rest, rest[0][0][0])).rstrip()
        parts.append(paragraph(note.format(label, text), index in marked))
    return Page(column(parts))


def _pieces(
    text: str, tokens: Iterable[tuple[Sequence[int], float, float]], cursor: int
) -> list[tuple[str, float, str]]:
    """Text from `cursor` on; tokens are span, value, shade. All tokens of a multi-byte character have its span."""
    pieces = []
    for (start, end), value, shade in tokens:
        start = max(start, cursor)
        if start < end:
            pieces += [(text[cursor:start], 0.0, ""), (text[start:end], shade, f"{value:.3g}" if shade else "")]
            cursor = end
    return pieces


def show_levels(record: StateRecord | Mapping[str, Any]) -> Page:
    """x0, x1 and x2 of a question (a record, or a row of a states dataset) below one another.

    What each adds to the one before it is shaded; the instructions before the dialogue, the same in all, are left out.
    """
    record = record_of_row(record) if isinstance(record, Mapping) else record
    parts: list[Markup] = []
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
        before = lines
    return Page(column(parts))


def best_features(
    encoded: Encoded, layer: int, examples: TopExamples | None = None, n: int = 8, visual: bool | None = None
) -> Page:
    """The strongest features of a text, the token where each peaks, and what else it fires on.

    Args:
        layer: one that was encoded.
        examples: of that layer; None: no such column.
        visual: True: image tokens alone; False: all but image tokens; None: all tokens.

    Raises:
        DataError: no such tokens.
    """
    if visual is not None:
        others = ~encoded.visual if visual else encoded.visual
        if bool(others.all()):
            raise DataError(f"there is no {'visual' if visual else 'text'} token in it")
        encoded = replace(encoded, special=encoded.special | others)
    features = top_features(encoded, layer, n=n)
    return Page(_feature_table(encoded, features, examples))


def turn_features(
    encoded: Encoded,
    layer: int,
    span: tuple[int, int],
    examples: TopExamples | None = None,
    n: int = 8,
    idf: Tensor | None = None,
) -> Page:
    """The strongest features of a turn within its session, and the turn shaded by the first of them.

    Args:
        span: characters of the turn in the text.
        idf: [d_sae], weights for the ranking, which lower features that fire everywhere; None: 1.
    """
    features = top_features(encoded, layer, span=span, n=n, idf=idf)
    body: str = encoded.text[slice(*span)]
    if features:
        values = _activations(encoded, layer, features[0].feature)
        inside = [
            ((max(start, span[0]), min(end, span[1])), value, value / (float(values.max()) or 1.0))
            for (start, end), value in zip(encoded.offsets.tolist(), values.tolist(), strict=True)
        ]
        body = shaded(_pieces(encoded.text, inside, span[0]), BLUE).rstrip()
    return Page(paragraph(body) + _feature_table(encoded, features, examples))


def _feature_table(encoded: Encoded, features: Sequence[FeatureActivation], examples: TopExamples | None) -> Markup:
    rows: list[list[str]] = []
    for one in features:
        peak = "image token" if bool(encoded.visual[one.peak]) else _word(one.token)
        rows.append([str(one.feature), f"{one.value:.2f}", str(one.fires), peak])
        if examples is not None:
            top = examples.examples(one.feature, 2)
            rows[-1].append(Markup("<br>").join(_example(example, top[0].value) for example in top))
    return table(_HEAD if examples is not None else _HEAD[:-1], rows)


def show_examples(examples: TopExamples, feature: int, n: int = 6, name: object = "") -> Page:
    """The examples on which a feature fires most, shaded token by token, below the share of tokens it fires on.

    Args:
        name: of the feature, such as one of `Workbench.explanations`, or "".
    """
    top = examples.examples(feature, n)
    density = int(examples.fired[feature]) / max(examples.n_tokens, 1)
    title = f"feature {feature}: fires on {density:.2%} of {examples.n_tokens:,} tokens"
    title += f": {name}" if name else ""
    line = Markup('<span style="opacity:.55">{:6.2f}</span> {}')
    lines = [paragraph(line.format(one.value, _example(one, top[0].value))) for one in top]
    return Page(Markup().join([heading(title), *lines]))


def search_table(examples: TopExamples, query: str, n: int = 6) -> Page:
    """The features whose examples match a query best, with the best example of each (`sae.probe.search`)."""
    matches = search(examples, query, n)
    if not matches:
        return Page(paragraph(f"no feature's examples match {query!r}"))
    rows = [[str(one.feature), f"{one.score:.2f}", _example(one.example, one.example.value)] for one in matches]
    return Page(table(["feature", "score", "best example"], rows))


def show_generated(
    backbone: Backbone,
    messages: Sequence[str],
    under: Mapping[str, AbstractContextManager[Any]],
    max_new_tokens: int = 32,
) -> Page:
    """What a model writes in reply to each message, greedily, under edits of its residual stream.

    Args:
        under: by name, `sae.probe.steer(...)` and `ablate(...)`, each good for one call; `nullcontext()` for no edit.
        max_new_tokens: where replies are cut.

    Raises:
        ModelError: a model that does not generate, or a message it cannot take.
    """
    rows: dict[str, list[list[str]]] = {message: [] for message in messages}
    for name, edit in under.items():
        with edit:
            outputs = generate(backbone, messages, max_new_tokens, len(messages))
        for message, output in zip(messages, outputs, strict=True):
            if output is None or output.failure is not None:
                raise ModelError(f"{backbone.name} wrote nothing: {output.message if output else message}")
            rows[message].append([name, output.text.strip() + ("" if output.finished else " …")])
    parts = [part for message in messages for part in (heading(message), table(["run", "reply"], rows[message]))]
    return Page(column(parts))


def feature_heat(encoded: Encoded, layer: int, features: Sequence[int], image: Image, grid: Tensor) -> Picture:
    """An image, and heat maps of where on it features fire.

    Args:
        encoded: of `Probe.encode_inputs`, with one image.
        image: that image.
        grid: image_grid_thw of the inputs, [1, 3]: patches in time, height and width.

    Raises:
        DataError: not the tokens of one image.
    """
    from matplotlib.colors import ListedColormap

    _, height, width = (int(value) for value in grid[0])
    # two patches per token along each side
    rows, columns, tokens = height // 2, width // 2, image_tokens(encoded)
    figure = new_figure(2.3 * (1 + len(features)), 2.5)
    panels = figure.subplots(1, 1 + len(features), squeeze=False)[0]
    panels[0].imshow(image)
    panels[0].set_title("image", fontsize=9)
    for axes, feature in zip(panels[1:], features, strict=True):
        values = _activations(encoded, layer, feature)[tokens].reshape(rows, columns)
        axes.imshow(image.convert("L"), cmap="gray", vmin=-128, vmax=255, extent=(0, columns, rows, 0))
        shade = values / (float(values.max()) or 1.0) * 0.75
        colour = ListedColormap([COLOURS[5]])
        axes.imshow(values.numpy(), cmap=colour, alpha=shade.numpy(), extent=(0, columns, rows, 0))
        axes.set_title(f"{feature}: up to {float(values.max()):.2g}", fontsize=9)
    for axes in panels:
        axes.set_axis_off()
    return Picture(figure)


def example_words(examples: TopExamples, features: Sequence[int]) -> Mapping[int, str]:
    """The token on which each feature fires most, as a label; features without examples are left out."""
    tops = {feature: examples.examples(feature, 1) for feature in features}
    return {feature: _word(top[0].text[slice(*top[0].span)]) for feature, top in tops.items() if top}


def image_tokens(encoded: Encoded) -> slice:
    """The tokens of the only image. Raises DataError where there is none, or more than one."""
    places = encoded.visual.nonzero().squeeze(-1).tolist()
    if not places or places[-1] - places[0] + 1 != len(places):
        raise DataError("give inputs with one image")
    return slice(places[0], places[-1] + 1)


def _word(token: str) -> str:
    """A token as a label; white space is shown escaped."""
    return token.strip() or repr(token)[1:-1]


def _activations(encoded: Encoded, layer: int, feature: int) -> Tensor:
    codes = encoded.layer(layer)
    return (codes.values * (codes.indices == feature)).sum(-1).float()


def _example(example: Example, top: float) -> Markup:
    tokens = [(span, value, value / (top or 1.0)) for span, value in zip(example.offsets, example.values, strict=True)]
    pieces = _pieces(example.text, tokens, 0)
    return shaded([(text.replace("\n", " ⏎ "), shade, tip) for text, shade, tip in pieces], BLUE)
