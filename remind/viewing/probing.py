"""What fires where: features of a turn, examples of a feature, features that speak of something, on pixels too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remind.core.errors import DataError
from remind.viewing.page import BLUE, Page, heading, paragraph, shaded, table
from sae.figures import COLOURS, Picture, new_figure
from sae.probe import Encoded, Example, TopExamples, search, top_features

if TYPE_CHECKING:
    from PIL.Image import Image


def best_features(
    encoded: Encoded, layer: int, examples: TopExamples | None = None, n: int = 8, visual: bool | None = None
) -> Page:
    """The strongest features of a text, where each peaks, and what else it fires on.

    Args:
        layer: one that was encoded.
        examples: of that layer; None: no such column.
        visual: True: over image tokens alone; False: over the others alone; None: over all.

    Raises:
        DataError: no such tokens.
    """
    if visual is not None:
        encoded = _only(encoded, visual)
    found = top_features(encoded, layer, n=n)
    rows = []
    for one in found:
        peak = "image token" if bool(encoded.visual[one.peak]) else escape(_word(one.token))
        row = [str(one.feature), f"{one.value:.2f}", str(one.fires), peak]
        rows.append([*row, _brief(examples, one.feature)] if examples is not None else row)
    head = ["feature", "activation", "tokens", "peak", "elsewhere"][: 5 if examples is not None else 4]
    return Page(table(head, rows), "\n".join(map(str, found)))


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
        idf: [d_sae], weights of the ranking, so that features which fire everywhere stand back; None: 1.
    """
    found = top_features(encoded, layer, span=span, n=n, idf=idf)
    body = paragraph(
        _by_feature(encoded, layer, found[0].feature, span) if found else escape(encoded.text[slice(*span)])
    )
    rows = [
        [str(one.feature), f"{one.value:.2f}", str(one.fires), escape(_word(one.token)), _brief(examples, one.feature)]
        for one in found
    ]
    head = ["feature", "activation", "tokens", "peak", "elsewhere"]
    return Page(body + table(head, rows), "\n".join([encoded.text[slice(*span)].strip(), *map(str, found)]))


def show_feature(encoded: Encoded, layer: int, feature: int) -> Page:
    """A text, its tokens shaded by the activation of one feature."""
    return Page(
        heading(f"feature {feature}, layer {layer}")
        + paragraph(_by_feature(encoded, layer, feature, (0, len(encoded.text)))),
        encoded.text,
    )


def show_examples(examples: TopExamples, feature: int, n: int = 6) -> Page:
    """The examples on which a feature fires most, shaded token by token, under how often it fires at all."""
    found = examples.examples(feature, n)
    density = int(examples.fired[feature]) / max(examples.n_tokens, 1)
    title = f"feature {feature}: fires on {density:.2%} of {examples.n_tokens:,} tokens"
    lines = [f'<span style="opacity:.55">{one.value:6.2f}</span> {_example(one, found[0].value)}' for one in found]
    return Page(heading(title) + "".join(map(paragraph, lines)), examples.to_text(feature, n))


def search_table(examples: TopExamples, query: str, n: int = 6) -> Page:
    """The features whose examples speak of something, with their best example (`sae.probe.search`)."""
    found = search(examples, query, n)
    rows = [[str(one.feature), f"{one.score:.2f}", _example(one.example, one.example.value)] for one in found]
    text = "\n".join(map(str, found)) or f"no feature's examples speak of {query!r}"
    return Page(table(["feature", "score", "best example"], rows) if rows else paragraph(escape(text)), text)


def feature_heat(
    encoded: Encoded, layer: int, features: Sequence[int], image: Image, grid: Tensor, merge: int = 2
) -> Picture:
    """An image, and where on it features fire: one map of its tokens for each feature.

    Args:
        encoded: of `Probe.encode_inputs`, with one image.
        image: the same as a picture.
        grid: image_grid_thw of the inputs, [1, 3]: patches in time, height and width.
        merge: patches a token has along each side.

    Raises:
        DataError: more or fewer image tokens than the grid says.
    """
    from matplotlib.colors import ListedColormap

    _, height, width = (int(value) for value in grid[0])
    rows, columns = height // merge, width // merge
    places = torch.arange(len(encoded))[image_tokens(encoded)]
    if len(places) != rows * columns:
        raise DataError(f"{len(places)} image tokens, but the grid says {rows} x {columns}: give inputs with one image")
    figure = new_figure(2.3 * (1 + len(features)), 2.5)
    panels = figure.subplots(1, 1 + len(features), squeeze=False)[0]
    panels[0].imshow(image)
    panels[0].set_title("image", fontsize=9)
    for axes, feature in zip(panels[1:], features, strict=True):
        values = _activations(encoded, layer, feature)[places].reshape(rows, columns)
        axes.imshow(image.convert("L"), cmap="gray", vmin=-128, vmax=255, extent=(0, columns, rows, 0))
        shade = values / (float(values.max()) or 1.0) * 0.75
        # one colour, and how much of it
        colour = ListedColormap([COLOURS[5]])
        axes.imshow(values.numpy(), cmap=colour, alpha=shade.numpy(), extent=(0, columns, rows, 0))
        axes.set_title(f"{feature}: up to {float(values.max()):.2g}", fontsize=9)
    for axes in panels:
        axes.set_axis_off()
    return Picture(figure)


def example_words(examples: TopExamples, features: Sequence[int]) -> Mapping[int, str]:
    """The token on which each feature fires most, to be shown beside its number."""
    found = {feature: examples.examples(feature, 1) for feature in features}
    return {feature: _word(one[0].text[slice(*one[0].span)]) for feature, one in found.items() if one}


def _word(token: str) -> str:
    """A token on a line of its own."""
    return token.strip() or repr(token)[1:-1]


def image_tokens(encoded: Encoded) -> slice:
    """The tokens of an image, which stand together. Raises DataError where there is none, or more than one."""
    places = encoded.visual.nonzero().squeeze(-1).tolist()
    if not places or places[-1] - places[0] + 1 != len(places):
        raise DataError("give inputs with one image")
    return slice(places[0], places[-1] + 1)


def _only(encoded: Encoded, visual: bool) -> Encoded:
    """As if no other tokens counted."""
    others = ~encoded.visual if visual else encoded.visual
    if bool(others.all()):
        raise DataError(f"there is no {'visual' if visual else 'text'} token in it")
    return replace(encoded, special=encoded.special | others)


def _activations(encoded: Encoded, layer: int, feature: int) -> Tensor:
    codes = encoded.layer(layer)
    return torch.where((codes.indices == feature) & codes.active(), codes.values, 0).sum(-1).float()


def _by_feature(encoded: Encoded, layer: int, feature: int, span: tuple[int, int]) -> str:
    values = _activations(encoded, layer, feature)
    top = float(values.max()) or 1.0
    pieces, cursor = [], span[0]
    for (start, end), value in zip(encoded.offsets.tolist(), values.tolist(), strict=True):
        start, end = max(start, cursor), min(end, span[1])
        if start >= end:
            continue
        pieces += [
            (encoded.text[cursor:start], 0.0, ""),
            (encoded.text[start:end], value / top, f"{value:.3g}" if value else ""),
        ]
        cursor = end
    return shaded([*pieces, (encoded.text[cursor : span[1]], 0.0, "")], BLUE).rstrip()


def _example(example: Example, top: float) -> str:
    pieces, cursor = [], 0
    for (start, end), value in zip(example.offsets, example.values, strict=True):
        start = max(start, cursor)
        pieces.append(
            (example.text[start:end].replace("\n", " ⏎ "), value / (top or 1.0), f"{value:.3g}" if value else "")
        )
        cursor = max(cursor, end)
    return shaded(pieces, BLUE)


def _brief(examples: TopExamples | None, feature: int, n: int = 2) -> str:
    if examples is None:
        return ""
    found = examples.examples(feature, n)
    return "<br>".join(_example(one, found[0].value) for one in found)
