"""Feature pages: top examples, firing rate, activations and decoder neighbours of each feature of a coder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae import files
from sae.errors import ConfigError, ShapeError
from sae.metrics import density_histogram
from sae.pages import Snippets, digits, page
from sae.probe.encoder import Probe
from sae.probe.examples import TopExamples
from sae.probe.pictures import TopPictures
from sae.topk import TopKSAE

#: Entries of [features, d_sae] compared at a time.
_CHUNK = 1 << 24
#: Bins of effects on logits; an even number, so that none holds both signs.
_BINS = 40


@torch.no_grad()
def neighbours(coder: TopKSAE, features: Sequence[int], n: int = 6) -> list[list[tuple[int, float]]]:
    """For each feature the other features with the most similar decoder rows: (feature, cosine), falling."""
    rows = F.normalize(coder.W_dec.detach().float(), dim=1)
    result: list[list[tuple[int, float]]] = []
    for part in torch.as_tensor(list(features), dtype=torch.int64).split(max(1, _CHUNK // len(rows))):
        part = part.to(rows.device)
        cosine = rows[part] @ rows.t()
        cosine[torch.arange(len(part)), part] = -torch.inf
        values, indices = cosine.topk(min(n, len(rows) - 1), dim=1)
        result += [list(zip(*pair, strict=True)) for pair in zip(indices.tolist(), values.tolist(), strict=True)]
    return result


class Effects(NamedTuple):
    """What a feature adds to the logits of tokens, for an activation of 1 at the last layer.

    Attributes:
        promoted, suppressed: tokens of the largest and of the least effect, with it.
        largest: of all effects, without sign.
        counts: tokens of the vocabulary by effect, in `_BINS` bins from -largest to largest.
    """

    promoted: list[tuple[str, float]]
    suppressed: list[tuple[str, float]]
    largest: float
    counts: list[int]


@torch.no_grad()
def logit_effects(
    model: nn.Module, tokenizer: Any, coder: TopKSAE, features: Sequence[int], n: int = 8
) -> list[Effects] | None:
    """For each feature the products of its decoder row with the output embeddings; the final norm is left out.

    None for a model without a language-model head. Of early layers this says little.

    Args:
        n: tokens listed at each end.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    weight = getattr(None if find is None else find(), "weight", None)
    if weight is None or weight.shape[-1] != coder.d_in:
        return None
    rows = coder.W_dec.detach()[list(features)].to(weight.device, torch.float32)
    result: list[Effects] = []
    for part in rows.split(max(1, _CHUNK // len(weight))):
        products = part @ weight.float().t()
        most, least = (products.topk(min(n, len(weight)), 1, largest) for largest in (True, False))
        for number, effects in enumerate(products.cpu()):
            promoted, suppressed = (
                [
                    (tokenizer.decode([token]), round(value, 4))
                    for token, value in zip(end.indices[number].tolist(), end.values[number].tolist(), strict=True)
                ]
                for end in (most, least)
            )
            largest = float(effects.abs().max())
            counts = torch.histc(effects, _BINS, -largest, largest).int().tolist()
            result.append(Effects(promoted, suppressed, float(f"{largest:.4g}"), counts))
    return result


def strongest(record: TopExamples, most: int, pictures: TopPictures | None = None) -> list[int]:
    """At most so many features, those with the largest activations on text or pictures, by falling activation."""
    peaks = {feature: record.examples(feature, 1)[0].value for feature in record.features().tolist()}
    if pictures is not None:
        for feature in pictures.features():
            peaks[feature] = max(peaks.get(feature, 0.0), pictures.examples(feature, 1)[0].value)
    return sorted(peaks, key=lambda feature: (-peaks[feature], feature))[:most]


def write_dashboard(
    path: str | Path,
    coder: TopKSAE,
    record: TopExamples,
    *,
    features: Sequence[int] | None = None,
    most: int = 500,
    per_feature: int | None = None,
    probe: Probe | None = None,
    names: Mapping[int, Mapping[str, Any]] | None = None,
    pictures: TopPictures | None = None,
    show: Callable[[str], tuple[str, str]] = lambda source: ("", source),
    title: str = "",
) -> Path:
    """Write the page of a layer's features: one self-contained HTML file.

    Args:
        coder: of the layer.
        record: of the layer, as `sae.probe.collect` returns it.
        features: which to show, in this order; None: those with the largest activations, at most `most`.
        per_feature: examples shown of each; None: all of the record.
        names: what features respond to, {"text", "scores"}: by name of a score {"value", "low", "high", "n"} or None.
        pictures: of the layer, on which features fire, too; None: text alone.
        show: from the source of a picture its small image as a data: URL, and a caption.
        probe: with a language model, to show the tokens each feature promotes and suppresses; None: left out.
        title: of the page, e.g. model and layer.

    Raises ConfigError or ShapeError for a feature that does not exist or another coder, StorageError.
    """
    if record.d_sae != coder.d_sae:
        raise ShapeError(f"the record is of {record.d_sae} features, the coder has {coder.d_sae}")
    chosen = strongest(record, most, pictures) if features is None else list(features)
    if wrong := [feature for feature in chosen if not 0 <= feature < coder.d_sae]:
        raise ConfigError(f"feature {wrong[0]} does not exist; the coder has 0 to {coder.d_sae - 1}")
    layer = record.metadata.get("layer")
    seen = pictures or TopPictures(coder.d_sae)
    fired, n_tokens = record.fired + seen.fired, record.n_tokens + seen.n_tokens
    html = page(
        "sae.pages",
        "dashboard.html.j2",
        "dashboard.css",
        "dashboard.js",
        data=_data(coder, record, chosen, per_feature or record.per_feature, probe, names or {}, seen, show),
        pictures=pictures is not None,
        title=title or (f"Features of layer {layer}" if layer is not None else "Features"),
        record=record,
        shown=len(chosen),
        seen=seen,
        dead=int((fired == 0).sum()),
        density=_density_bars(fired, n_tokens),
        coder=coder,
    )
    with files.atomic(Path(path)) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return Path(os.path.abspath(path))


def _data(
    coder: TopKSAE,
    record: TopExamples,
    chosen: Sequence[int],
    per_feature: int,
    probe: Probe | None,
    names: Mapping[int, Mapping[str, Any]],
    pictures: TopPictures,
    show: Callable[[str], tuple[str, str]],
) -> dict[str, Any]:
    """JSON for dashboard.js."""
    snippets, shown = Snippets(), dict[str, int]()

    def number(source: str) -> int:
        return shown.setdefault(source, len(shown))

    effects = None if probe is None else logit_effects(probe.model, probe.tokenizer, coder, chosen)
    rows = []
    for place, (feature, near) in enumerate(zip(chosen, neighbours(coder, chosen), strict=True)):
        edges, counts = record.histogram(feature)
        top = record.examples(feature, per_feature)
        known = {(one.source, one.position) for one in top}
        drawn = [one for one in record.drawn(feature) if (one.source, one.position) not in known]
        found = pictures.examples(feature, per_feature)
        rows.append(
            {
                "id": feature,
                "fired": int(record.fired[feature]),
                "fired_images": int(pictures.fired[feature]),
                "max": round(max([0.0, *(one.value for one in top[:1]), *(one.value for one in found[:1])]), 4),
                "edges": [float(f"{edge:.4g}") for edge in edges],
                "counts": counts,
                "examples": [snippets.put(one, top[0].value) for one in top],
                "drawn": [snippets.put(one, top[0].value) for one in drawn],
                "pictures": [
                    [number(one.source), digits(one.values, found[0].value), one.columns, round(one.value, 4)]
                    for one in found
                ],
                "near": [[other, round(cosine, 4)] for other, cosine in near],
                "logits": None if effects is None else effects[place],
                "name": names.get(feature),
            }
        )
    tokens_read = {"tokens": record.n_tokens, "image_tokens": pictures.n_tokens}
    return {"features": rows, **tokens_read, "snippets": snippets.rows, "pictures": [show(source) for source in shown]}


def _density_bars(fired: Tensor, n_tokens: int) -> dict[str, Any]:
    """The layer's features by firing density, as bars of a chart 100 high."""
    histogram = density_histogram(fired, n_tokens)
    edges, counts = histogram["edges"], histogram["counts"]
    highest = max(counts) or 1
    bars = [
        {"x": i, "height": round(100 * count / highest, 2), "count": count, "low": low, "high": high}
        for i, (count, low, high) in enumerate(zip(counts, edges, edges[1:], strict=False))
    ]
    decades = [{"x": i, "label": f"{100 * edge:g} %"} for i, edge in enumerate(edges) if i % 4 == 0]
    return {"bars": bars, "decades": decades, "n": len(bars)}
