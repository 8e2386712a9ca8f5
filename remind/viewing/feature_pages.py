"""The command `feature-pages`: from a folder of SAEs and dialogues to pages on disk."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from remind.core.errors import ConfigError, ModelError
from remind.core.progress import ProgressBar
from remind.text.words import words
from remind.viewing.config import FeaturePagesConfig
from remind.viewing.workbench import open_workbench

if TYPE_CHECKING:
    from remind.llm.chat_models import Chats
    from remind.viewing.explanations import Explanation
    from remind.viewing.workbench import Workbench
    from sae.probe import TopExamples

#: Sessions from which excerpts are drawn on which a feature does not fire.
_SESSIONS = 64


def write_feature_pages(cfg: FeaturePagesConfig) -> list[Path]:
    """Write the page of each layer's features and, beside it, their names; prints where.

    The texts are the sessions as prompts show them. A dry run (llm.dry_run) writes no pages.

    Returns:
        The pages.

    Raises:
        ConfigError: pages exist already.
        DataError, FormatError: dialogues that cannot be read.
        ModelError: a backbone or SAEs that cannot be used, a layer without one, or a chat model that cannot be used.
    """
    from remind.llm.chat_models import Chats
    from sae import SAEError
    from sae.dashboard import strongest, write_dashboard
    from sae.probe import collect

    chats = Chats(cfg.llm)
    chats.stage("explain")  # an endpoint that cannot be used is told before any work
    bench = open_workbench(cfg.backbone, cfg.data or None, cfg.sae, device=cfg.device, dtype=cfg.dtype)
    layers = bench.layers if cfg.layers is None else cfg.layers
    pages = {layer: Path(cfg.out) / f"layer_{layer}.html" for layer in layers}
    if existing := [page for page in pages.values() if page.exists() and not cfg.overwrite]:
        raise ConfigError(f"{existing[0]} exists; choose another out or set overwrite")
    texts = list(islice(bench.texts(), cfg.limit))
    kept = cfg.per_feature if cfg.llm.endpoint("explain") is None else 2 * cfg.examples_named
    try:
        with ProgressBar("examples", len(texts)) as bar:
            found = collect(bench.probe, texts, layers, per_feature=max(cfg.per_feature, kept), progress=bar.advance_to)
        for layer, page in pages.items():
            features = strongest(found[layer], cfg.most)
            names = _names(cfg, chats, bench, texts, found[layer], layer, features)
            if chats.dry is None:
                write_dashboard(
                    page,
                    bench.coders[layer],
                    found[layer],
                    features=features,
                    per_feature=cfg.per_feature,
                    probe=bench.probe,
                    names={feature: asdict(name) for feature, name in names.items()},
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
    bench: Workbench,
    texts: list[tuple[str, str]],
    record: TopExamples,
    layer: int,
    features: list[int],
) -> dict[int, Explanation]:
    """Write the explanations of a layer; distinctive words stand in where no name was asked for or none came."""
    from remind.viewing.explanations import Background, explain, words_of, write_explanations

    counts = Counter(word for _, text in texts for word in words(text))
    names, chat = words_of(record, features, counts), chats.stage("explain")
    if chat is None:
        write_explanations(cfg.out, layer, bench.coders[layer], names)
        return names
    drawn = random.Random(0).sample([text for _, text in texts], min(_SESSIONS, len(texts)))
    background = Background(bench.probe.stream(drawn), layer, sum(record.context) + 1)
    written, failures = explain(chat, record, background, features[: cfg.named], cfg.examples_named)
    if chats.dry is None:
        names |= written
        costs = chats.ledger.summary()["total"]
        model = bench.coders[layer]
        summary = write_explanations(cfg.out, layer, model, names, failures, chat.name, costs)
        for kind, score in summary.items():
            if kind != "failures" and score is not None:
                print(
                    f"layer {layer}: {kind} {score['value']:.2f} [{score['low']:.2f}, {score['high']:.2f}], "
                    f"{score['n']} features"
                )
        if failures:
            print(f"layer {layer}: {len(failures)} requests failed, the last: {failures[-1].message}")
    return names
