"""What memory the training of SAEs is computed to need, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remind.core.memory import MemoryPlan
from remind.train_sae.config import TrainSAEConfig

if TYPE_CHECKING:
    from remind.models.backbone import Backbone


def memory_plan(
    cfg: TrainSAEConfig, backbone: Backbone, layers: Sequence[int], window: int, tokens: int, processes: int = 1
) -> MemoryPlan:
    """Of the backbone, the SAEs and their data; the buffer lies in main memory unless `buffer_on` is device.

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
    parts = {
        "weights": sum(part.numel() * part.element_size() for part in backbone.model.parameters()),
        # weights and two moments of all layers; gradients and a copy for dead features of one
        "SAEs": wide * coder * (3 * len(layers) + 2),
        "first tokens": wide * d * first * len(layers),
        # the first tokens of a layer, of all processes: joined, scaled, centred, reconstructed twice, or with features
        "start": wide * first * processes * max(5 * d, 3 * d + trainer.d_sae),
        # a batch in one layer's step: scaled, centred, error, its gradient, and gathered features
        "step": wide * share * (d * (len(layers) + 6) + trainer.d_sae),
        # what one block of a backbone has at once for a token
        "activations": narrow * row * (d * (2 * len(layers) + 6) + inner * 3),
        "buffer": narrow * d * len(layers) * min(max(cfg.buffer_tokens, 2 * share), -(-tokens // processes)),
    }
    hint = "a lower buffer_tokens, windows_per_batch, trainer.init_tokens or trainer.batch_size"
    on_host = ("buffer",) if cfg.buffer_on == "host" else ()
    return MemoryPlan(parts, hint, either=("start", "step", "activations"), on_host=on_host)
