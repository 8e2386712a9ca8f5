"""The command `feature-pages`: from a folder of SAEs and dialogues to pages on disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from remind.core.errors import ConfigError, ModelError
from remind.states.pyramid import one_line
from remind.text.words import words
from remind.viewing.config import FeaturePagesConfig
from remind.viewing.workbench import open_workbench

if TYPE_CHECKING:
    from remind.llm.client import Chats
    from remind.viewing.examples import Found
    from remind.viewing.excerpts import Captions
    from remind.viewing.explanations import Explanation
    from sae import TopKSAE

#: Longer side of an image on a page, in pixels.
PICTURE_SIZE = 160
#: Tokens to the left and right of an example's peak, and examples drawn at random of all that a feature fires on.
_CONTEXT, _DRAWN = (16, 16), 5


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
    from remind.llm.client import Chats
    from remind.models.images import thumbnail
    from remind.viewing.examples import read_examples
    from remind.viewing.excerpts import Captions
    from sae import SAEError
    from sae.dashboard import strongest, write_dashboard

    chats = Chats(cfg.llm)
    chats.stage("explain")  # an endpoint that cannot be used is reported before any work
    bench = open_workbench(cfg.backbone, cfg.data or None, cfg.sae, device=cfg.device, dtype=cfg.dtype)
    layers = bench.layers if cfg.layers is None else cfg.layers
    pages = {layer: Path(cfg.out) / f"layer_{layer}.html" for layer in layers}
    if existing := [page for page in pages.values() if page.exists() and not cfg.overwrite]:
        raise ConfigError(f"{existing[0]} exists; choose another out or set overwrite")
    images = (image for dialogue in bench.corpus.dialogues for turn in dialogue.turns for image in turn.images)
    captions = {image.path: one_line(image.caption) for image in images if image.path is not None and image.caption}
    counts = Counter(word for _, text in islice(bench.texts(), cfg.limit) for word in words(text))
    kept = cfg.per_feature if cfg.llm.endpoint("explain") is None else 2 * cfg.examples_named
    try:
        found = read_examples(
            bench, layers, max(cfg.per_feature, kept), cfg.image_tokens, cfg.limit, context=_CONTEXT, drawn=_DRAWN
        )
        for layer, page in pages.items():
            features = strongest(found.texts[layer], cfg.most, found.pictures[layer])
            named_by = Captions(captions, found.pictures[layer], found.shown[layer])
            names = _names(cfg, chats, bench.coders[layer], found, layer, features, counts, named_by)
            if chats.dry is None:
                write_dashboard(
                    page,
                    bench.coders[layer],
                    found.texts[layer],
                    features=features,
                    per_feature=cfg.per_feature,
                    probe=bench.probe,
                    names={feature: asdict(name) for feature, name in names.items()},
                    pictures=found.pictures[layer] if cfg.image_tokens else None,
                    show=lambda path: (thumbnail(path, PICTURE_SIZE), captions.get(path, "no caption")),
                    title=f"{cfg.backbone}, layer {layer}",
                )
                print(f"layer {layer}: {page}")
    except SAEError as error:
        raise ModelError(str(error)) from None
    if chats.dry is not None:
        print(chats.dry.report())
        return []
    return list(pages.values())


def _names(
    cfg: FeaturePagesConfig,
    chats: Chats,
    coder: TopKSAE,
    found: Found,
    layer: int,
    features: list[int],
    counts: Mapping[str, int],
    captions: Captions,
) -> dict[int, Explanation]:
    """Write the explanations of a layer; distinctive words stand in where no name was asked for or none came."""
    from remind.viewing.excerpts import Background
    from remind.viewing.explanations import explain, words_of, write_explanations

    record = found.texts[layer]
    read = {feature: [one.text for one in record.examples(feature)] for feature in features}
    shown = {feature: [one.text for one in captions.excerpts(feature)] for feature in features if not read[feature]}
    in_captions = Counter(word for path in captions.shown for word in words(captions.text.get(path, "")))
    names, chat = words_of(read, counts) | words_of(shown, in_captions), chats.stage("explain")
    if chat is None:
        write_explanations(cfg.out, layer, coder, names)
        return names
    background = Background.of(found.sample, layer, sum(record.context) + 1)
    written, failures = explain(chat, record, background, features[: cfg.named], cfg.examples_named, captions)
    if chats.dry is not None:
        return names
    names |= written
    costs = chats.ledger.summary()["total"]
    summary = write_explanations(cfg.out, layer, coder, names, failures, chat.name, costs)
    for kind, score in summary.items():
        if kind != "failures" and score is not None:
            print(
                f"layer {layer}: {kind} {score['value']:.2f} [{score['low']:.2f}, {score['high']:.2f}], n {score['n']}"
            )
    if failures:
        print(f"layer {layer}: {len(failures)} requests failed, the last: {failures[-1].message}")
    return names
