"""The command `feature-pages`: from a folder of SAEs and dialogues to pages on disk."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from remind.core.errors import ConfigError, ModelError
from remind.core.progress import ProgressBar
from remind.data.dialogue import Dialogue
from remind.llm.auxiliary import Failure
from remind.llm.client import Chats
from remind.models.backbone import Backbone
from remind.models.images import thumbnail
from remind.models.windows import Window, batches, make_windows, window_size
from remind.text.words import words
from remind.viewing.config import FeaturePagesConfig
from remind.viewing.explanations import Excerpt, background_of, caption_excerpt, explain, words_of, write_explanations
from remind.viewing.workbench import Workbench, open_workbench
from sae import SAEError
from sae.dashboard import strongest, write_dashboard
from sae.probe import Encoded
from sae.probe.examples import TopExamples
from sae.probe.pictures import TopPictures

#: Longer side of an image on a page, in pixels.
PICTURE_SIZE = 160
#: Tokens to the left and right of an example's peak, and examples drawn at random of all that a feature fires on.
_CONTEXT, _DRAWN = (16, 16), 5
#: Windows of a forward, and windows of the sample.
_BATCH, _SAMPLE = 8, 64
_SHOWN = 1000
#: Examples shown to the chat model of each feature, and as many held out for scoring.
_NAMED = 10


def write_feature_pages(cfg: FeaturePagesConfig) -> list[Path]:
    """Write the page of each layer's features and, beside it, their names; prints where.

    Sessions are read as prompts show them. A dry run (llm.dry_run) writes no pages.

    Returns:
        The pages.

    Raises:
        ConfigError: pages exist already.
        ImagePathError: an image that cannot be read.
        DataError, FormatError: dialogues that cannot be read.
        ModelError: a backbone or SAEs that cannot be used, a layer without one, or a chat model that cannot be used.
    """
    chats = Chats(cfg.llm)
    chat = chats.stage("explain")  # an endpoint that cannot be used is reported before any work
    bench = open_workbench(cfg.backbone, cfg.data or None, cfg.sae, device=cfg.device, dtype=cfg.dtype)
    layers = bench.layers if cfg.layers is None else cfg.layers
    pages = {layer: Path(cfg.out) / f"layer_{layer}.html" for layer in layers}
    if existing := [page for page in pages.values() if page.exists() and not cfg.overwrite]:
        raise ConfigError(f"{existing[0]} exists; choose another out or set overwrite")
    images = (image for dialogue in bench.corpus.dialogues for turn in dialogue.turns for image in turn.images)
    captions = {image.path: caption_excerpt(image.caption) for image in images if image.path and image.caption}
    nameless = caption_excerpt("no caption")
    counts = Counter(word for _, text in islice(bench.texts(), cfg.limit) for word in words(text))
    kept = cfg.per_feature if chat is None else 2 * _NAMED
    try:
        found = read_examples(
            bench, layers, max(cfg.per_feature, kept), cfg.image_tokens, cfg.limit, context=_CONTEXT, drawn=_DRAWN
        )
        for layer, page in pages.items():
            coder, record, pictures = bench.coders[layer], found.texts[layer], found.pictures[layer]
            features = strongest(record, cfg.most, pictures)
            shown = {path: on for path, on in found.shown[layer].items() if path in captions}
            # distinctive words stand in where no name was asked for or none came
            read = {feature: [one.text for one in record.examples(feature)] for feature in features}
            alone: dict[int, list[Excerpt]] = {}
            for feature in (one for one in features if not read[one]):
                paths = [image.source for image in pictures.examples(feature)]
                alone[feature] = list(dict.fromkeys(captions[path] for path in paths if path in captions))
            seen = {feature: [one.text for one in excerpts] for feature, excerpts in alone.items()}
            in_captions = Counter(word for path in shown for word in words(captions[path].text))
            names, failures = words_of(read, counts) | words_of(seen, in_captions), list[Failure]()
            if chat is not None:
                background = background_of(found.sample, layer, sum(record.context) + 1)
                at_large = [(captions[path], on) for path, on in shown.items()]
                named = features[: cfg.named]
                written, failures = explain(chat, record, background, named, _NAMED, (alone, at_large))
                names |= written
            if chats.dry is not None:
                continue
            costs = None if chat is None else chats.ledger.summary()["total"]
            model = None if chat is None else chat.name
            summary = write_explanations(cfg.out, layer, coder, names, failures, model, costs)
            for kind, score in summary.items():
                if kind != "failures" and score is not None:
                    figures = f"{score['value']:.2f} [{score['low']:.2f}, {score['high']:.2f}], n {score['n']}"
                    print(f"layer {layer}: {kind} {figures}")
            if failures:
                print(f"layer {layer}: {len(failures)} requests failed, the last: {failures[-1].message}")
            write_dashboard(
                page,
                coder,
                record,
                features=features,
                per_feature=cfg.per_feature,
                probe=bench.probe,
                names={feature: asdict(name) for feature, name in names.items()},
                pictures=pictures if cfg.image_tokens else None,
                show=lambda path: (
                    thumbnail(path, PICTURE_SIZE),
                    captions.get(path, nameless).text,
                ),
                title=f"{cfg.backbone}, layer {layer}",
            )
            print(f"layer {layer}: {page}")
    except SAEError as error:
        raise ModelError(str(error)) from None
    if chats.dry is not None:
        print(chats.dry.report())
        return []
    return list(pages.values())


class Found(NamedTuple):
    """What `read_examples` found.

    Attributes:
        texts, pictures: by layer the strongest examples on text, and on images, whose sources are paths.
        sample: the text of a few windows, drawn at random.
        shown: by layer of at most 1000 images, by path, the features that fire on them.
    """

    texts: dict[int, TopExamples]
    pictures: dict[int, TopPictures]
    sample: list[Encoded]
    shown: dict[int, dict[str, frozenset[int]]]


def read_examples(
    bench: Workbench,
    layers: Sequence[int],
    per_feature: int,
    image_tokens: int = 0,
    limit: int | None = None,
    **kept: Any,
) -> Found:
    """The strongest examples of every feature over all sessions, read in windows as `remind train-sae` reads them.

    Contexts of text leave out special tokens and tokens of images.

    Args:
        image_tokens: of each image that lies on disk, at most; 0: images are not shown.
        limit: sessions that are read, the first ones.
        kept: further settings of `TopExamples`.

    Raises:
        ModelError: a layer without an SAE, or a backbone that takes no images. ImagePathError: an image that cannot be
            read.
    """
    backbone, probe = bench.backbone, bench.probe
    if missing := [layer for layer in layers if layer not in probe.coders]:
        raise ModelError(f"layer {missing[0]} does not exist; there are SAEs of {sorted(probe.coders)}")
    dialogues: list[Dialogue] = []
    label_of_turn: list[str] = []
    left = sys.maxsize if limit is None else limit
    for dialogue in bench.corpus.dialogues:
        sessions = dialogue.sessions[:left]
        if not sessions:
            break
        left -= len(sessions)
        dialogues.append(replace(dialogue, sessions=sessions))
        label_of_turn += [f"{dialogue.id}/{session.id}" for session in sessions for _ in session.turns]
    windows = make_windows(backbone, dialogues, window_size(backbone, None), "tokenise", image_tokens)
    drawn = set(random.Random(0).sample(range(len(windows)), min(_SAMPLE, len(windows))))
    found = Found({}, {}, [], {layer: {} for layer in layers})
    for layer in layers:
        d_sae = probe.coders[layer].d_sae
        kept |= {"tokenizer": probe.tokenizer, "metadata": {"layer": layer}}
        found.texts[layer] = TopExamples(d_sae, per_feature, **kept)
        found.pictures[layer] = TopPictures(d_sae, per_feature)
    with ProgressBar("examples", len(windows)) as bar:
        for number, (inputs, _) in enumerate(batches(backbone, windows, _BATCH, image_tokens)):
            first = number * _BATCH
            group = windows[first : first + _BATCH]
            encoded = probe.encode_inputs(inputs)
            words = [_chosen(one, ~(one.visual | one.special)) for one in encoded]
            found.sample.extend(one for place, one in enumerate(words, start=first) if place in drawn)
            images = list(_images(backbone, encoded, group, inputs.get("image_grid_thw")))
            for layer in layers:
                found.texts[layer].add(words, layer, [label_of_turn[window.turns[0]] for window in group])
                for path, one, columns in images:
                    codes, shown = one.layer(layer), found.shown[layer]
                    found.pictures[layer].add(path, codes, columns)
                    if path in shown or len(shown) < _SHOWN:
                        shown[path] = shown.get(path, frozenset()) | set(codes.indices[codes.active()].tolist())
            bar.advance_to(first + len(group))
    return found


def _images(
    backbone: Backbone, encoded: Sequence[Encoded], windows: Sequence[Window], grids: Tensor | None
) -> Iterator[tuple[str, Encoded, int]]:
    """Each image of a batch: its path, its tokens, and how many of them are a row."""
    rest = [] if grids is None else grids.tolist()
    for one, window in zip(encoded, windows, strict=True):
        tokens, start = one.visual.nonzero().flatten(), 0
        for path in window.images:
            _, height, width = rest.pop(0)
            merge = int(backbone.processor.image_processor.merge_size)
            count = height * width // merge**2
            yield path, _chosen(one, tokens[start : start + count]), width // merge
            start += count


def _chosen(encoded: Encoded, tokens: Tensor) -> Encoded:
    """Some of the tokens of a text, by mask or number; their offsets are those in the whole text."""
    numbers = tokens.nonzero().flatten() if tokens.dtype == encoded.visual.dtype else tokens
    return replace(
        encoded,
        ids=encoded.ids[numbers],
        tokens=tuple(encoded.tokens[n] for n in numbers.tolist()),
        offsets=encoded.offsets[numbers],
        codes={layer: codes[numbers] for layer, codes in encoded.codes.items()},
        special=encoded.special[numbers],
        sink=encoded.sink[numbers],
        visual=encoded.visual[numbers],
    )
