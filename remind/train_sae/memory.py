"""What memory a run is computed to need, before it starts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from remind.core.errors import ConfigError
from remind.train_sae.config import TrainSAEConfig

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

#: Copies of one layer's first tokens, of all processes, while its coder is started: joined, scaled, centred, and
#: reconstructed twice.
_START_COPIES = 5
#: Copies of a batch in one layer's step: scaled, centred, error, its gradient, and gathered features.
_STEP_COPIES = 6
#: Vectors as wide as the hidden state, and as the inner layer, that one block of a backbone has at once for a token.
_BLOCK_STATES, _BLOCK_INNER = 6, 3


def needs(
    cfg: TrainSAEConfig, backbone: Backbone, layers: Sequence[int], window: int, tokens: int, processes: int = 1
) -> dict[str, int]:
    """Bytes by purpose, for each process.

    Args:
        window: tokens of a row.
        tokens: of the training data.
        processes: among which each batch is divided.
    """
    trainer, d = cfg.trainer, backbone.hidden_size
    text = backbone.model.config.get_text_config()
    inner = int(getattr(text, "intermediate_size", None) or 4 * d)
    narrow, wide = backbone.dtype.itemsize, 8 if trainer.dtype == "float64" else 4
    share = -(-trainer.batch_size // processes)
    first = min(-(-trainer.init_tokens // trainer.batch_size), trainer.total_steps) * share
    coder = (2 * d + 1) * trainer.d_sae + d
    row = cfg.windows_per_batch * window
    return {
        "backbone": sum(part.numel() * part.element_size() for part in backbone.model.parameters()),
        # weights and two moments of all layers; gradients and a copy for dead features of one
        "SAEs": wide * coder * (3 * len(layers) + 2),
        "first tokens": wide * d * first * (len(layers) + _START_COPIES * processes),
        "step": wide * share * (d * (len(layers) + _STEP_COPIES) + trainer.d_sae),
        "forward": narrow * row * (d * (2 * len(layers) + _BLOCK_STATES) + inner * _BLOCK_INNER),
        "buffer": narrow * d * len(layers) * min(max(cfg.buffer_tokens, 2 * share), -(-tokens // processes)),
    }


def check_memory(cfg: TrainSAEConfig, parts: Mapping[str, int], device: torch.device) -> str:
    """One line with the sums. Raises ConfigError where a device, or main memory, cannot hold its sum.

    Args:
        parts: `needs`.
    """
    apart = ("buffer",) if device.type != "cpu" and cfg.buffer_on == "host" else ()
    places = {str(device) if device.type != "cpu" else "main memory": [name for name in parts if name not in apart]}
    if apart:
        places["main memory"] = list(apart)
    lines = []
    for place, names in places.items():
        here = torch.device("cpu") if place == "main memory" else device
        copies = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if here.type == "cpu" else 1
        total, most = copies * sum(parts[name] for name in names), capacity(here)
        summands = " + ".join(f"{name} {parts[name] / 1e9:.1f}" for name in names)
        each = f", for each of {copies} processes" if copies > 1 else ""
        line = f"{place}: {summands}{each}: {total / 1e9:.1f} of {most / 1e9:.1f} GB"
        if total > most:
            hint = "buffer_on host, or a lower" if "buffer" in names and here.type != "cpu" else "a lower"
            raise ConfigError(
                f"the run is computed to need more memory than there is ({line}); {hint} buffer_tokens, "
                "windows_per_batch, trainer.init_tokens or trainer.batch_size would help"
            )
        lines.append(line)
    return f"memory by computation: {'; '.join(lines)}"


def capacity(device: torch.device) -> int:
    """Bytes of a device, or of main memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
