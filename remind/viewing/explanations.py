"""Names of features, written by a chat model and scored by it; kept as JSON.

The scores are those of automated interpretability. Detection: which excerpts hold something that fits the name, half of
them top examples that the namer was not shown, half excerpts on which the feature does not fire. Fuzzing: in which of
the held-out examples the marked tokens are those that fire; in half of them as many other tokens are marked. The
control scores the name of another feature, drawn at random, on the same excerpts.

Features that fire on images alone are named by the captions of these, and have a detection score alone.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, product
from pathlib import Path
from typing import Any, TypeAlias

from remind.core.errors import DataError
from remind.core.files import read_json, write_json
from remind.core.progress import ProgressBar
from remind.evaluation.statistics import bootstrap, wilson
from remind.grounding.codes import tensors_hash
from remind.llm.request import ChatModel, Request, code_for, fenced, from_template
from remind.llm.structured import object_schema
from remind.memory.logged import numbered
from remind.perception.auxiliary import Failure, plain
from remind.states import prompts
from remind.states.pyramid import one_line
from sae import TopKSAE
from sae.probe import Encoded, Example, TopExamples

TEMPLATES = {name: f"explain_{name}" for name in ("name", "captions", "detection", "fuzzing")}
#: Length asked of a name, in words; twice as many are kept.
NAME_WORDS = 20
#: Room for a name and for verdicts, in tokens; models that think first need some of it.
_ROOM = 1024
#: Excerpts of the background, at most.
_BACKGROUND = 1000

#: Excerpts with the features that fire on them, to draw those from on which a feature does not fire.
Background: TypeAlias = "Sequence[tuple[Excerpt, frozenset[int]]]"


@dataclass(frozen=True)
class Excerpt:
    """A few tokens in a row: their texts, and on which of them a feature fires."""

    pieces: tuple[str, ...]
    fires: tuple[bool, ...]

    @property
    def text(self) -> str:
        return one_line("".join(self.pieces))

    def marked(self, marks: Sequence[bool]) -> str:
        """The text on one line, with runs of marked tokens between « and »."""
        parts = []
        for mark, group in groupby(zip(self.pieces, marks, strict=True), key=lambda pair: pair[1]):
            run = "".join(piece for piece, _ in group).replace("«", '"').replace("»", '"')
            inner = run.strip()
            parts.append(run.replace(inner, f"«{inner}»", 1) if mark and inner else run)
        return one_line("".join(parts))


def excerpt(example: Example) -> Excerpt:
    """The context of a top example."""
    return Excerpt(_cut(example.text, example.offsets), tuple(value > 0 for value in example.values))


def _cut(text: str, offsets: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Text of each token, with white space between it and the token before it; tokens may share characters."""
    pieces, cursor = [], offsets[0][0] if offsets else 0
    for start, end in offsets:
        gap = text[cursor:start]
        pieces.append((gap if gap.isspace() else "") + text[max(start, cursor) : end])
        cursor = max(cursor, end)
    return tuple(pieces)


def background_of(texts: Iterable[Encoded], layer: int, size: int, seed: int = 0) -> Background:
    """Excerpts of encoded texts at large with the features that fire on them.

    Args:
        texts: at most 1000 windows of them are kept, drawn at random.
        layer: whose features are meant.
        size: tokens of an excerpt, at most.
    """
    # a text that is shorter than an excerpt is one as it is
    windows = [(one, start) for one in texts for start in range(0, max(len(one) - size, 0) + 1, size)]
    random.Random(seed).shuffle(windows)
    found = []
    for one, start in windows[:_BACKGROUND]:
        part, codes = slice(start, start + size), one.layer(layer)
        pieces = _cut(one.text, one.offsets[part].tolist())
        active = frozenset(codes.indices[part][codes.active()[part]].tolist())
        found.append((Excerpt(pieces, (False,) * len(pieces)), active))
    return found


def caption_excerpt(text: str) -> Excerpt:
    """The caption of an image, nothing marked in it."""
    return Excerpt((one_line(text),), (False,))


@dataclass(frozen=True)
class Explanation:
    """What a feature responds to.

    Attributes:
        text: its name.
        scores: detection, fuzzing, and the same of another feature's name (detection_control,
            fuzzing_control), each an accuracy with its 95 % interval (value, low, high, n); None where a reply failed.
    """

    text: str
    scores: Mapping[str, Mapping[str, float] | None] = field(default_factory=dict)

    def __str__(self) -> str:
        shown = [f"{name} {score['value']:.2f}" for name, score in self.scores.items() if score]
        return f"{self.text} ({', '.join(shown)})" if shown else self.text


#: By kind of score, excerpts with what is right for each.
_Trials: TypeAlias = dict[str, list[tuple[str, bool]]]


def _trials(feature: int, held: Sequence[Excerpt], background: Background, draws: random.Random) -> _Trials:
    """As many right as wrong excerpts of each kind, in random order."""
    silent = [one for one, active in background if feature not in active]
    silent = draws.sample(silent, min(len(held), len(silent)))
    right = [one.marked(one.fires) for one in held[: len(held) // 2]]
    wrong = []
    for one in held[len(held) // 2 :] if any(held[0].fires) else ():
        free = [n for n, piece in enumerate(one.pieces) if piece.strip() and not one.fires[n]]
        if free:
            chosen = set(draws.sample(free, min(len(free), sum(one.fires))))
            wrong.append(one.marked([n in chosen for n in range(len(one.pieces))]))
    trials: _Trials = {}
    for kind, yes, no in (
        ("detection", [one.text for one in held], [one.text for one in silent]),
        ("fuzzing", right, wrong),
    ):
        n = min(len(yes), len(no))
        cases = [(text, True) for text in yes[:n]] + [(text, False) for text in no[:n]]
        draws.shuffle(cases)
        if cases:
            trials[kind] = cases
    return trials


def _name_request(sample: str, shown: Sequence[Excerpt]) -> Request:
    text = numbered([one.marked(one.fires) for one in shown])
    code = code_for([text])
    values = {"code": code, "words": NAME_WORDS, "excerpts": fenced("excerpts", text, code)}
    template = TEMPLATES["name" if any(shown[0].fires) else "captions"]
    return from_template("explain", template, sample, None, _ROOM, **values)


def _score_request(sample: str, kind: str, texts: Sequence[str], name: str) -> Request:
    n, text = len(texts), numbered(texts)
    code = code_for([text, name])
    verdicts = {"type": "array", "items": {"type": "boolean"}, "minItems": n, "maxItems": n}
    values = {"description": fenced("description", name, code), "excerpts": fenced("excerpts", text, code)}
    schema = object_schema(verdicts=verdicts)
    return from_template("explain", TEMPLATES[kind], sample, schema, _ROOM, code=code, count=n, **values)


def explain(
    chat: ChatModel,
    record: TopExamples,
    background: Background,
    features: Iterable[int],
    examples: int = 10,
    captions: tuple[Mapping[int, Sequence[Excerpt]], Background] = ({}, ()),
) -> tuple[dict[int, Explanation], list[Failure]]:
    """Have features named and the names scored; all names are asked for together, then all scores.

    Of each feature's top examples some, drawn at random, are shown to the namer, and the others are held out for
    scoring. Features with fewer than four examples are left out.

    Args:
        record: with twice as many examples of a feature as are to be shown.
        examples: shown of each feature at most, and held out at most.
        captions: of the images that features without an example in the record fire on most, by feature, and those of
            images at large with the features that fire on them.

    Returns:
        The explanations, and what failed: a name ("unusable": empty, or the prompt, else as in `Reply`), or a score
        ("invalid": no JSON, or not one verdict for each excerpt). A failure is no wrong verdict: its score is None.

    Raises:
        ModelError: the endpoint as a whole cannot be used.
    """
    shown: dict[int, list[Excerpt]] = {}
    trials: dict[int, _Trials] = {}
    for feature in features:
        draws = random.Random(feature)
        found, silent = [excerpt(example) for example in record.examples(feature, 2 * examples)], background
        if not found:
            found, silent = list(captions[0].get(feature, ())[: 2 * examples]), captions[1]
        if len(found) >= 4:
            draws.shuffle(found)
            shown[feature] = found[: len(found) // 2]
            trials[feature] = _trials(feature, found[len(found) // 2 :], silent, draws)
    failures: list[Failure] = []
    names: dict[int, str] = {}
    where = f"layer {record.metadata.get('layer')} feature"
    with ProgressBar("names", len(shown)) as bar:
        requests = [_name_request(f"{where} {feature}", found) for feature, found in shown.items()]
        replies = chat.complete(requests, lambda *_: bar.step())
    for feature, request, reply in zip(shown, requests, replies, strict=True):
        name = "" if reply.failure else " ".join(plain(reply.text).split()[: 2 * NAME_WORDS])
        # small models repeat the prompt
        if name and "<<<" not in name:
            names[feature] = name
        else:
            why = (reply.failure or "unusable", reply.message or "no name: empty, or the prompt")
            failures.append(Failure("explain", request.sample, *why))
    tasks: list[tuple[int, str, list[tuple[str, bool]], Request]] = []
    for feature, name in names.items():
        others = [text for other, text in names.items() if other != feature and text != name]
        pairs = [("", name), *([("_control", random.Random(f"{feature}").choice(others))] if others else [])]
        for (kind, cases), (suffix, text) in product(trials[feature].items(), pairs):
            request = _score_request(f"{where} {feature} {kind}{suffix}", kind, [one for one, _ in cases], text)
            tasks.append((feature, kind + suffix, cases, request))
    scores: dict[int, dict[str, Mapping[str, float] | None]] = {feature: {} for feature in names}
    with ProgressBar("scores of names", len(tasks)) as bar:
        replies = chat.complete([request for *_, request in tasks], lambda *_: bar.step())
    for (feature, kind, cases, request), reply in zip(tasks, replies, strict=True):
        scores[feature][kind] = None
        if reply.failure is not None:
            failures.append(Failure("explain", request.sample, reply.failure, reply.message))
            continue
        right = [float(one == other) for one, (_, other) in zip(reply.value["verdicts"], cases, strict=True)]
        scores[feature][kind] = wilson(right)  # type: ignore[assignment]
    return {feature: Explanation(name, scores[feature]) for feature, name in names.items()}, failures


def file_of(folder: str | Path, layer: int) -> Path:
    return Path(folder) / f"layer_{layer}.explanations.json"


def write_explanations(
    folder: str | Path,
    layer: int,
    coder: TopKSAE,
    found: Mapping[int, Explanation],
    failures: Sequence[Failure],
    model: str,
    costs: Mapping[str, Any],
) -> dict[str, Any]:
    """Write a layer's explanations beside its page.

    Args:
        costs: of the run so far.

    Returns:
        Of each score the mean over features with its 95 % interval by bootstrap, and `failures` by kind.
    """
    kinds = list(dict.fromkeys(kind for one in found.values() for kind in one.scores))
    scores = [[score["value"] for one in found.values() if (score := one.scores.get(kind))] for kind in kinds]
    summary: dict[str, Any] = {kind: bootstrap(values) for kind, values in zip(kinds, scores, strict=True)}
    summary["failures"] = dict(Counter(failure.failure for failure in failures))
    value = {
        "layer": layer,
        "sae": tensors_hash(coder.state_dict()),
        "model": model,
        "prompts": {name: prompts.prompt_id(name) for name in TEMPLATES.values()},
        "summary": summary,
        "features": {str(feature): asdict(one) for feature, one in found.items()},
        "failures": [asdict(failure) for failure in failures],
        "costs": costs,
    }
    write_json(file_of(folder, layer), value)
    return summary


def read_explanations(folder: str | Path, coders: Mapping[int, TopKSAE]) -> dict[int, dict[int, Explanation]]:
    """Explanations that `remind feature-pages` wrote, by layer and feature.

    Args:
        coders: by layer, the SAEs they must be of; other layers are left out.

    Raises:
        DataError: no such files, a damaged one, or explanations of other SAEs.
    """
    result: dict[int, dict[int, Explanation]] = {}
    for path in sorted(Path(folder).glob("layer_*.explanations.json")):
        content = read_json(path)
        try:
            layer, sae = int(content["layer"]), content["sae"]
            found = {int(feature): Explanation(**row) for feature, row in content["features"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise DataError("no explanations of features as feature-pages writes them", path) from None
        if layer not in coders:
            continue
        if sae != tensors_hash(coders[layer].state_dict()):
            raise DataError(f"explanations of another SAE than that of layer {layer}", path)
        result[layer] = found
    if not result:
        raise DataError(
            "no layer_<number>.explanations.json of these layers; feature-pages has a model write them", folder
        )
    return result
