"""Do SAEs fit a model they were not trained on?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from remind.core.files import write_json
from remind.grounding.ground import check_saes, load_saes
from remind.train_sae.config import CheckSAEConfig, TrainSAEConfig
from remind.train_sae.corpus import data_paths, read_dialogues

#: SAEs that leave more of the variance unexplained, or lose more of the loss against zeros, are said not to fit.
WORST_FVU, LEAST_RECOVERED = 0.5, 0.8


def check_sae(cfg: CheckSAEConfig) -> dict[str, Any]:
    """Measure FVU, cosine, L0, dead features and, for causal models, the cross entropy recovered, by layer.

    An SAE fits where FVU is at most .5 and the loss recovered (1: reconstructions are as good as the stream, 0: as
    zeros) at least .8. SAEs trained on a base model usually still fit its chat model; on a model with another tokenizer
    or other training they reconstruct less than the mean does.

    Returns what is printed, by layer: the figures of `training.json`, `recovered` and `fits`.

    Raises:
        DataError, FormatError: data that cannot be read.
        ModelError: SAEs or a backbone that cannot be read, or of other widths and layers than each other.
    """
    from remind.models.backbone import load_backbone
    from remind.train_sae.run import Run
    from sae.parallel import Processes
    from sae.trainer import Trained

    coders, _ = load_saes(cfg.sae, cfg.device)
    same = ("data", "format", "backbone", "limit", "window", "windows_per_batch", "sink_factor", "device", "dtype")
    settings = TrainSAEConfig("", **{name: getattr(cfg, name) for name in same}, loss_windows=cfg.loss_windows)
    dialogues = read_dialogues(data_paths(cfg.data), settings)
    backbone = load_backbone(cfg.backbone, dtype=cfg.dtype, device=cfg.device)
    check_saes(backbone, coders, folder=cfg.sae)
    run = Run(settings, backbone, list(coders), Processes())
    run.trained = Trained(coders, steps=0, tokens=0, figures={})
    run.evaluate(dialogues)
    layers = {}
    for layer in coders:
        spliced = (run.recovered or {}).get(str(layer))
        figures = {**run.scores[layer], "recovered": spliced and spliced["recovered"], "loss": spliced}
        fvu, recovered = figures["fvu"], figures["recovered"]
        enough = spliced is None or (recovered is not None and recovered >= LEAST_RECOVERED)
        figures["fits"] = fvu is not None and fvu <= WORST_FVU and enough
        layers[str(layer)] = figures
        shown = {"FVU": fvu, "cosine": figures["cosine"], "loss recovered": recovered, "dead": figures["dead"]}
        shown["L0"] = figures["l0"]
        line = ", ".join(f"{name} {value:.3f}" for name, value in shown.items() if value is not None)
        print(f"layer {layer}: {line}: {'fits' if figures['fits'] else 'does not fit'} {backbone.name}")
    result = {"config": asdict(cfg), "layers": layers}
    if cfg.out:
        write_json(Path(cfg.out), result)
    return result
