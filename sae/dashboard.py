"""Feature pages: what each feature of a coder fires on, how often, how strongly, and what writes in its direction."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sae import files
from sae.errors import ConfigError, ShapeError
from sae.metrics import Evaluation
from sae.pages import page
from sae.pages.snippets import Snippets
from sae.probe.encoded import Encoded
from sae.probe.encoder import Probe
from sae.probe.examples import TopExamples, collect
from sae.topk import SparseCodes, TopKSAE

#: Powers of two between which activations are told apart, and bins to each.
_LOWEST, _HIGHEST, _PER_OCTAVE = -12, 14, 2
#: Entries of [features, d_sae] compared at a time.
_CHUNK = 1 << 24


class Activations:
    """How strongly each feature fires: counts of active tokens by activation, in bins of half an octave.

    Attributes:
        counts: int64 [d_sae, bins]; the first bin also holds what is smaller, the last what is larger.
        edges: the bins + 1 borders, in units of the coder.
    """

    def __init__(self, d_sae: int) -> None:
        bins = (_HIGHEST - _LOWEST) * _PER_OCTAVE
        self.counts = torch.zeros(d_sae, bins, dtype=torch.int64)
        self.edges = [2.0 ** (_LOWEST + i / _PER_OCTAVE) for i in range(bins + 1)]

    def add(self, codes: SparseCodes) -> None:
        """Count the active entries of codes [..., k]. Raises ShapeError for a feature that is not there."""
        d_sae, bins = self.counts.shape
        active = codes.active()
        feature, value = codes.indices[active], codes.values[active].double()
        if len(feature) and int(feature.max()) >= d_sae:
            raise ShapeError(f"codes name feature {int(feature.max())}, but there are {d_sae}")
        place = torch.bucketize(value, torch.tensor(self.edges[1:-1], dtype=torch.float64), right=True)
        self.counts += torch.bincount(feature * bins + place, minlength=d_sae * bins).view(d_sae, bins)

    def histogram(self, feature: int) -> tuple[list[float], list[int]]:
        """(edges [n + 1], counts [n]) from the lowest to the highest bin that holds anything; ([], []) if none does."""
        held = self.counts[feature].nonzero().flatten().tolist()
        if not held:
            return [], []
        first, last = held[0], held[-1]
        return self.edges[first : last + 2], self.counts[feature, first : last + 1].tolist()


class FeatureRecord(TopExamples):
    """`TopExamples` that also keep how strongly every feature fires, in `activations`."""

    def __init__(self, d_sae: int, *args: Any, **named: Any) -> None:
        super().__init__(d_sae, *args, **named)
        self.activations = Activations(d_sae)

    def add(self, encoded: Encoded | Sequence[Encoded], layer: int, labels: Sequence[str | None] | None = None) -> None:
        super().add(encoded, layer, labels)
        for text in [encoded] if isinstance(encoded, Encoded) else encoded:
            self.activations.add(text.layer(layer)[text.counted])


def record(
    probe: Probe,
    texts: Iterable[str | tuple[str, str]],
    layers: Sequence[int] | None = None,
    *,
    per_feature: int = 8,
    context: tuple[int, int] = (12, 12),
    progress: Callable[[int], None] | None = None,
) -> dict[int, FeatureRecord]:
    """Run texts through a probe once and keep what feature pages show.

    Args:
        texts: texts, or pairs of a label and a text.
        layers: None: all of the probe's.
        per_feature, context: as in `TopExamples`. progress: as in `collect`.

    Raises:
        as `collect`.
    """
    chosen = list(probe.coders if layers is None else layers)
    into = {
        layer: FeatureRecord(
            probe.coders[layer].d_sae, per_feature, context, tokenizer=probe.tokenizer, metadata={"layer": layer}
        )
        for layer in chosen
        if layer in probe.coders
    }
    collect(probe, texts, chosen, into=into, progress=progress)
    return into


@torch.no_grad()
def neighbours(coder: TopKSAE, features: Sequence[int], n: int = 6) -> list[list[tuple[int, float]]]:
    """For each feature those whose decoder rows point most nearly its way: (feature, cosine), falling; not itself."""
    rows = F.normalize(coder.W_dec.detach().float(), dim=1)
    found: list[list[tuple[int, float]]] = []
    most = min(n, len(rows) - 1)
    for part in torch.as_tensor(list(features), dtype=torch.int64).split(max(1, _CHUNK // max(1, len(rows)))):
        part = part.to(rows.device)
        cosine = rows[part] @ rows.t()
        cosine[torch.arange(len(part)), part] = -torch.inf
        values, indices = cosine.topk(most, dim=1)
        found += [
            list(zip(who, value, strict=True)) for who, value in zip(indices.tolist(), values.tolist(), strict=True)
        ]
    return found


@torch.no_grad()
def promoted_tokens(
    model: nn.Module, tokenizer: Any, coder: TopKSAE, features: Sequence[int], n: int = 8
) -> list[list[str]] | None:
    """For each feature the tokens whose output embeddings its decoder row adds most to.

    The row is multiplied with the output embeddings as it stands, without the layers and the norm between them, so that
    this says little of early layers. None for a model without a language-model head.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    weight = getattr(head, "weight", None)
    if weight is None or weight.shape[-1] != coder.d_in:
        return None
    rows = coder.W_dec.detach()[list(features)].to(weight.device, torch.float32)
    found: list[list[str]] = []
    for part in rows.split(max(1, _CHUNK // len(weight))):
        best = (part @ weight.float().t()).topk(min(n, len(weight)), dim=1).indices.tolist()
        found += [[tokenizer.decode([token]) for token in row] for row in best]
    return found


def write_dashboard(
    path: str | Path,
    coder: TopKSAE,
    kept: FeatureRecord,
    *,
    features: Sequence[int] | None = None,
    most: int = 500,
    probe: Probe | None = None,
    title: str = "",
) -> Path:
    """Write the page of a layer's features: one HTML file that needs nothing else.

    Args:
        coder: of the layer. kept: what `record` gave for it.
        features: which to show, in this order; None: those with the largest activations, at most `most`.
        probe: with a language model, to name the tokens each feature promotes; None: left out.
        title: over the page, e.g. model and layer.

    Raises:
        ConfigError: a feature that is not there. ShapeError: a coder of another size. StorageError: no room.
    """
    if kept.d_sae != coder.d_sae:
        raise ShapeError(f"the record is of {kept.d_sae} features, the coder has {coder.d_sae}")
    chosen = list(_strongest(kept, most) if features is None else features)
    if wrong := [feature for feature in chosen if not 0 <= feature < coder.d_sae]:
        raise ConfigError(f"feature {wrong[0]} is not there; the coder has 0 to {coder.d_sae - 1}")
    layer = kept.metadata.get("layer")
    html = page(
        "sae.pages",
        "dashboard.html.j2",
        scripts=[("sae.pages", "dashboard.js")],
        styles=[("sae.pages", "dashboard.css")],
        data=dashboard_data(coder, kept, chosen, probe),
        title=title or (f"Features of layer {layer}" if layer is not None else "Features"),
        kept=kept,
        shown=len(chosen),
        dead=int((kept.fired == 0).sum()),
        density=_density_bars(kept),
    )
    with files.atomic(Path(path)) as temporary:
        temporary.write_text(html, encoding="utf-8")
    return Path(os.path.abspath(path))


def dashboard_data(
    coder: TopKSAE, kept: FeatureRecord, chosen: Sequence[int], probe: Probe | None = None
) -> Mapping[str, Any]:
    """What the script of the page reads, as JSON values."""
    snippets = Snippets()
    tokens = None if probe is None else promoted_tokens(probe.model, probe.tokenizer, coder, chosen)
    rows = []
    for place, (feature, near) in enumerate(zip(chosen, neighbours(coder, chosen), strict=True)):
        edges, counts = kept.activations.histogram(feature)
        examples = snippets.of_feature(kept, feature, kept.per_feature)
        rows.append(
            {
                "id": feature,
                "fired": int(kept.fired[feature]),
                "max": examples[0][3] if examples else 0.0,
                "edges": [float(f"{edge:.4g}") for edge in edges],
                "counts": counts,
                "examples": examples,
                "near": [[other, round(cosine, 4)] for other, cosine in near],
                "tokens": None if tokens is None else tokens[place],
            }
        )
    return {"features": rows, "tokens": kept.n_tokens, "snippets": snippets.rows}


def _strongest(kept: FeatureRecord, most: int) -> list[int]:
    peaks = [(-kept.examples(feature, 1)[0].value, feature) for feature in kept.features().tolist()]
    return [feature for _, feature in sorted(peaks)[:most]]


def _density_bars(kept: FeatureRecord) -> dict[str, Any]:
    """The layer's features by firing density, as bars of a chart 100 high."""
    figures = Evaluation(1, kept.d_sae)
    sums = figures.sums()
    sums[0] = kept.n_tokens
    sums[-kept.d_sae :] = kept.fired.double()
    figures.load_sums(sums)
    found = figures.density_histogram()
    highest = max(found["counts"], default=0) or 1
    bars = [
        {"x": i, "height": round(100 * count / highest, 2), "count": count, "low": low, "high": high}
        for i, (count, low, high) in enumerate(zip(found["counts"], found["edges"], found["edges"][1:], strict=False))
    ]
    decades = [{"x": i, "label": f"{100 * edge:g} %"} for i, edge in enumerate(found["edges"]) if i % 4 == 0]
    return {"bars": bars, "decades": decades, "n": len(bars)}
