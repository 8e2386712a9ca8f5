"""The command `feature-pages`: from a folder of SAEs and dialogues to pages on disk."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from remind.core.errors import ConfigError, ModelError
from remind.core.progress import ProgressBar
from remind.viewing.config import FeaturePagesConfig
from remind.viewing.workbench import open_workbench


def write_feature_pages(cfg: FeaturePagesConfig) -> list[Path]:
    """Write the page of each layer's features; prints where. The texts are the sessions as prompts show them.

    Returns:
        The pages.

    Raises:
        ConfigError: pages exist already.
        DataError, FormatError: dialogues that cannot be read.
        ModelError: a backbone or SAEs that cannot be used, or a layer without one.
    """
    from sae import SAEError
    from sae.dashboard import write_dashboard
    from sae.probe import collect

    bench = open_workbench(cfg.backbone, cfg.data or None, cfg.sae, device=cfg.device, dtype=cfg.dtype)
    layers = bench.layers if cfg.layers is None else cfg.layers
    pages = {layer: Path(cfg.out) / f"layer_{layer}.html" for layer in layers}
    if existing := [page for page in pages.values() if page.exists() and not cfg.overwrite]:
        raise ConfigError(f"{existing[0]} exists; choose another out or set overwrite")
    texts = list(islice(bench.texts(), cfg.limit))
    try:
        with ProgressBar("examples", len(texts)) as bar:
            found = collect(bench.probe, texts, layers, per_feature=cfg.per_feature, progress=bar.advance_to)
        for layer, page in pages.items():
            title = f"{cfg.backbone}, layer {layer}"
            write_dashboard(page, bench.coders[layer], found[layer], most=cfg.most, probe=bench.probe, title=title)
            print(f"layer {layer}: {page}")
    except SAEError as error:
        raise ModelError(str(error)) from None
    return list(pages.values())
