"""What memory the training of SAEs is computed to need, before it starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from remind.core.memory import MemoryPlan
from remind.train_sae.config import TrainSAEConfig

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

#: Copies of one layer's first tokens, of all processes, while its coder is started: joined, scaled, centred, and
#: reconstructed twice; and beside their features.
_START_COPIES, _START_BESIDE = 5, 3
#: Copies of a batch in one layer's step: scaled, centred, error, its gradient, and gathered features.
_STEP_COPIES = 6
#: Vectors as wide as the hidden state, and as the inner layer, that one block of a backbone has at once for a token.
_BLOCK_STATES, _BLOCK_INNER = 6, 3


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
    on_host = ("buffer",) if cfg.buffer_on == "host" else ()
    parts = {
        "weights": sum(part.numel() * part.element_size() for part in backbone.model.parameters()),
        # weights and two moments of all layers; gradients and a copy for dead features of one
        "SAEs": wide * coder * (3 * len(layers) + 2),
        "first tokens": wide * d * first * len(layers),
        "start": wide * first * processes * max(_START_COPIES * d, _START_BESIDE * d + trainer.d_sae),
        "step": wide * share * (d * (len(layers) + _STEP_COPIES) + trainer.d_sae),
        "activations": narrow * row * (d * (2 * len(layers) + _BLOCK_STATES) + inner * _BLOCK_INNER),
        "buffer": narrow * d * len(layers) * min(max(cfg.buffer_tokens, 2 * share), -(-tokens // processes)),
    }
    lower = "a lower buffer_tokens, windows_per_batch, trainer.init_tokens or trainer.batch_size"
    hint = lower if on_host or cfg.device == "cpu" else f"buffer_on host, or {lower}"
    return MemoryPlan(parts, hint, either=("start", "step", "activations"), on_host=on_host)
