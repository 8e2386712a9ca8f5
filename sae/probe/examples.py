"""Top-activating examples of every feature, collected from a stream of texts of any length, and search in them."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sae.errors import ConfigError, LayerError, ShapeError
from sae.probe.encoder import Encoded, Probe, decoded
from sae.probe.ranking import Ranking, Tokens
from sae.topk import SparseCodes

_WORD = re.compile(r"\w+")
#: Borders of the bins of activations, half an octave each, in units of the coder; the outer bins are open.
EDGES = [2.0 ** (i / 2) for i in range(-24, 29)]


@dataclass(frozen=True)
class Example:
    """A token a feature fires on, with the tokens around it.

    Attributes:
        value: activation at the peak token, in units of the coder.
        source: number of the text, from 0 in order of arrival; `label`: its name, if it has one.
        position: of the peak token in its text, in tokens; `peak`: in the context.
        ids, values: C context tokens, fewer at the ends of the text, and activations of the feature on them.
        text: what the ids decode to, and `offsets`: C times (start, end) in it.
    """

    feature: int
    value: float
    source: int
    label: str | None
    position: int
    ids: tuple[int, ...]
    values: tuple[float, ...]
    text: str
    offsets: tuple[tuple[int, int], ...]
    peak: int

    @property
    def span(self) -> tuple[int, int]:
        """Characters of the peak token in `text`, without white space around it unless it is nothing else."""
        start, end = self.offsets[self.peak]
        token = self.text[start:end]
        if not token.strip():
            return start, end
        return start + len(token) - len(token.lstrip()), end - len(token) + len(token.rstrip())

    def to_text(self) -> str:
        """One line: value, source, and the text with the peak token in «»."""
        start, end = self.span
        marked = f"{self.text[:start]}«{self.text[start:end]}»{self.text[end:]}"
        where = self.source if self.label is None else self.label
        return f"{self.value:9.4g}  [{where}:{self.position}]  " + marked.replace("\n", "\\n")

    __str__ = to_text


class TopExamples:
    """The `per_feature` examples with the largest activations of each feature of one coder.

    Exact, as if every active token were sorted, with at most one example per feature and text, the largest; among equal
    values the earliest wins.

    Args:
        d_sae: features of the coder.
        per_feature: examples kept of each.
        context: tokens to the left and to the right of the peak.
        tokenizer: decodes the contexts; None: ids are written as numbers.
        metadata: what the examples are of, e.g. the layer.
        drawn: examples kept of each beside these, drawn at random from all tokens that it fires on.

    Attributes:
        n_texts, n_tokens: texts added, and their tokens that count.
        counts: [d_sae, bins] int64, tokens each feature was active on, by activation in the bins of `EDGES`.

    Raises ConfigError for sizes out of range.
    """

    def __init__(
        self,
        d_sae: int,
        per_feature: int = 20,
        context: tuple[int, int] = (10, 10),
        *,
        tokenizer: Any = None,
        metadata: Mapping[str, Any] | None = None,
        drawn: int = 0,
    ) -> None:
        self._ranking = Ranking(d_sae, per_feature, (context[0], context[1]))
        self._drawn = Ranking(d_sae, drawn, (context[0], context[1])) if drawn else None
        self._generator = torch.Generator().manual_seed(0)
        self.d_sae, self.per_feature, self.context = d_sae, per_feature, self._ranking.context
        self.metadata = dict(metadata or {})
        self.n_texts = self.n_tokens = 0
        self.counts = torch.zeros(d_sae, len(EDGES) - 1, dtype=torch.int64)
        self._labels: dict[int, str] = {}
        self._tokenizer = tokenizer

    def add(self, encoded: Encoded | Sequence[Encoded], layer: int, labels: Sequence[str | None] | None = None) -> None:
        """Add whole texts; many at a time is faster. Their numbers continue those of earlier calls.

        Args:
            encoded: of a `Probe`.
            layer: the one the coder belongs to.
            labels: names of the texts.

        Raises ShapeError for parts that do not fit together, LayerError for a layer that was not encoded.
        """
        texts = [encoded] if isinstance(encoded, Encoded) else list(encoded)
        parts = [text.layer(layer) for text in texts]
        if labels is not None and len(labels) != len(texts):
            raise ShapeError(f"{len(labels)} labels for {len(texts)} texts")
        if not texts:
            return
        counted = torch.cat([text.counted for text in texts])
        values = torch.cat([codes.values for codes in parts]).detach().masked_fill(~counted[:, None], 0)
        codes = SparseCodes(values, torch.cat([codes.indices for codes in parts]))
        ids = torch.cat([text.ids for text in texts])
        tokens = Tokens(ids, [len(text) for text in texts], codes, self.d_sae)
        self._ranking.add(tokens, self.n_texts)
        if self._drawn is not None:
            # the largest random numbers of all are an even draw, whatever else arrives later
            ranks = 1 - torch.rand(values.shape, dtype=torch.float64, generator=self._generator)
            self._drawn.add(tokens, self.n_texts, ranks)
        active, (d_sae, bins) = codes.active(), self.counts.shape
        inner = torch.tensor(EDGES[1:-1], dtype=torch.float64)
        place = torch.bucketize(codes.values[active].double(), inner, right=True)
        self.counts += torch.bincount(codes.indices[active] * bins + place, minlength=d_sae * bins).view(d_sae, bins)
        for number, label in enumerate(labels or ()):
            if label is not None:
                self._labels[self.n_texts + number] = label
        self.n_texts += len(texts)
        self.n_tokens += int(counted.sum())

    @property
    def fired(self) -> Tensor:
        """[d_sae] int64, tokens each feature was active on; fired / n_tokens is its density."""
        return self.counts.sum(1)

    def histogram(self, feature: int) -> tuple[list[float], list[int]]:
        """(edges [n + 1], counts [n]) from the lowest to the highest bin that is not empty; ([], []) without any."""
        filled = self.counts[feature].nonzero().flatten().tolist()
        if not filled:
            return [], []
        first, last = filled[0], filled[-1]
        return EDGES[first : last + 2], self.counts[feature, first : last + 1].tolist()

    def features(self) -> Tensor:
        """[F] int64: features that have an example, ascending."""
        return (self._ranking.tensors["value"][:, 0] > 0).nonzero().squeeze(-1)

    def examples(self, feature: int, n: int | None = None) -> list[Example]:
        """Examples by falling value, at most n. Raises ConfigError for a feature that does not exist."""
        return self._found(self._ranking, feature, n)

    def drawn(self, feature: int) -> list[Example]:
        """Those drawn at random, at most one of a text, by falling value; errors as of `examples`."""
        found = [] if self._drawn is None else self._found(self._drawn, feature, None)
        return sorted(found, key=lambda example: -example.value)

    def _found(self, ranking: Ranking, feature: int, n: int | None) -> list[Example]:
        if not 0 <= feature < self.d_sae:
            raise ConfigError(f"feature {feature} does not exist; the coder has 0 to {self.d_sae - 1}")
        examples = []
        for rank, source, position, ids, around in ranking.entries(feature, n):
            value = rank if ranking is self._ranking else around[self.context[0]]
            inside = [i for i, token in enumerate(ids) if token >= 0]
            tokens, values = tuple(ids[i] for i in inside), tuple(around[i] for i in inside)
            text, spans = decoded(self._tokenizer, tokens)
            label, peak = self._labels.get(source), inside.index(self.context[0])
            examples.append(
                Example(int(feature), value, source, label, position, tokens, values, text, tuple(spans), peak)
            )
        return examples

    def to_text(self, feature: int, n: int = 5) -> str:
        """The feature's first n examples, one per line, under its density."""
        examples = self.examples(feature, n)
        density = int(self.fired[feature]) / max(self.n_tokens, 1)
        head = f"feature {feature}: active on {density:.3%} of {self.n_tokens:,} tokens in {self.n_texts:,} texts"
        return "\n".join([head, *map(str, examples)])

    def __repr__(self) -> str:
        return f"TopExamples({len(self.features())} of {self.d_sae} features, {self.n_texts:,} texts)"


def collect(
    probe: Probe,
    texts: Iterable[str | tuple[str, str]],
    layers: int | Sequence[int] | None = None,
    *,
    per_feature: int = 20,
    context: tuple[int, int] = (10, 10),
    progress: Callable[[int], None] | None = None,
) -> dict[int, TopExamples]:
    """Encode texts from a stream and keep the top examples of every feature; the texts are not kept in memory.

    Args:
        probe: with coders of the layers.
        texts: texts, or pairs of a label and a text.
        layers: a layer or several; None: all of the probe's.
        per_feature, context: as in `TopExamples`.
        progress: called with the number of texts done so far.

    Returns:
        Layer to its examples.

    Raises LayerError for a layer the probe does not have; other errors as `Probe.encode`.
    """
    result: dict[int, TopExamples] = {}
    for layer in [layers] if isinstance(layers, int) else (probe.coders if layers is None else layers):
        if layer not in probe.coders:
            raise LayerError(f"layer {layer} does not exist; the probe has {sorted(probe.coders)}")
        d_sae, metadata = probe.coders[layer].d_sae, {"layer": layer}
        result[layer] = TopExamples(d_sae, per_feature, context, tokenizer=probe.tokenizer, metadata=metadata)
    labels: deque[str | None] = deque()

    def unlabelled() -> Iterator[str]:
        for item in texts:
            label, text = item if isinstance(item, tuple) else (None, item)
            labels.append(label)
            yield text

    stream, done = probe.stream(unlabelled()), 0
    while batch := list(islice(stream, probe.batch_size * 4)):
        names = [labels.popleft() for _ in batch]
        for layer, examples in result.items():
            examples.add(batch, layer, names)
        done += len(batch)
        if progress is not None:
            progress(done)
    return result


class FeatureMatch(NamedTuple):
    """A feature, its score, and the example that matched best (the strongest of equals)."""

    feature: int
    score: float
    example: Example

    def __str__(self) -> str:
        return f"{self.feature:>6}  {self.score:6.3f}  {self.example}"


def search(examples: TopExamples, query: str, n: int = 10) -> list[FeatureMatch]:
    """Find the features whose top examples match a query best.

    With v_e > 0 the activation of example e of a feature and m_e its match, the score is Σ_e v_e m_e / Σ_e v_e. The
    match is lexical (words are \\w+ casefolded): of the query's distinct words, m_e is the mean of the share found at
    the peak, in words that share a character with the peak token, and of the share found anywhere in the context.

    Returns:
        At most n features by falling score, above 0; among equals that with more examples, then the lower one.

    Raises ConfigError for a query without words.
    """
    words = {word.casefold() for word in _WORD.findall(query)}
    if not words:
        raise ConfigError(f"the query {query!r} has no words")
    matches: list[tuple[float, int, FeatureMatch]] = []
    for feature in examples.features().tolist():
        group = examples.examples(feature)
        scores = [_match(example, words) for example in group]
        total = sum(example.value for example in group)
        score = sum(example.value * m for example, m in zip(group, scores, strict=True)) / total
        if score > 0:
            best = group[scores.index(max(scores))]
            matches.append((-score, -len(group), FeatureMatch(feature, score, best)))
    matches.sort(key=lambda match: (*match[:2], match[2].feature))
    return [match for *_, match in matches[: max(n, 0)]]


def _match(example: Example, words: set[str]) -> float:
    start, end = example.span
    context: set[str] = set()
    peak: set[str] = set()
    for match in _WORD.finditer(example.text):
        word = match[0].casefold()
        if word in words:
            context.add(word)
            if match.start() < end and match.end() > start:
                peak.add(word)
    return (0.5 * len(peak) + 0.5 * len(context)) / len(words)
