"""Examples of features on dialogues, with or without their images: tokens of text, and patches of pictures."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from remind.core.errors import ModelError
from remind.core.progress import ProgressBar
from remind.models.windows import Window, batches, make_windows, window_size
from sae.probe.examples import TopExamples
from sae.probe.pictures import TopPictures

if TYPE_CHECKING:
    from torch import Tensor

    from remind.data.dialogue import Dialogue
    from remind.models.backbone import Backbone
    from remind.viewing.workbench import Workbench
    from sae.probe import Encoded

#: Windows of a forward, and windows of the sample.
_BATCH, _SAMPLE = 8, 64
_SHOWN = 1000


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
