"""The head of a language model, run apart from it: over few positions at a time and in at least float32.

At a vocabulary of 151,936 the float32 logits of 7,200 positions take 4.4 GB. So a forward gives the head its last
position alone, what the head was to be given for all of them is kept, and logits are made from that in chunks. All
that comes before the head is thereby the model's own. What some models do to the logits afterwards (the softcapping of
Gemma, the scales of Cohere, Granite and Falcon-H1) is done here as well and compared with what the model itself made of
its last position; a model that does anything else is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae.errors import ConfigError
from sae.hooks import edited

#: Logits, or widened weights of the head, held at a time: 2^25 numbers, 128 MB in float32.
_CHUNK = 1 << 25
Edit = Callable[[Tensor], Tensor]


class Head:
    """The head of a causal or vision-language model.

    Args:
        model: a Hugging Face model (or a peft model round one), in eval mode.

    Raises:
        ConfigError: no language-model head, a model that is not causal, or one in training mode.
    """

    def __init__(self, model: nn.Module) -> None:
        unwrap: Any = getattr(model, "get_base_model", lambda: model)
        bare = unwrap()
        name = type(bare).__name__
        module = bare.get_output_embeddings() if hasattr(bare, "get_output_embeddings") else None
        if not isinstance(module, nn.Module):
            raise ConfigError(f"{name} has no language-model head; load it as a causal or vision-language model")
        if "MaskedLM" in name or getattr(bare.config, "is_encoder_decoder", False):
            raise ConfigError(f"{name} does not predict the next token; a causal language model is needed")
        if model.training:
            raise ConfigError(f"{name} is in training mode, where runs differ by chance; call model.eval() first")
        self.model, self.module, self._name = model, module, name
        text = bare.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        self._cap = getattr(text, "final_logit_softcapping", None)
        self._factor = float(getattr(bare, "logit_scale", None) or 1)
        self._factor *= float(getattr(text, "lm_head_multiplier", None) or 1)
        self._factor /= float(getattr(text, "logits_scaling", None) or 1)
        self._takes_cache = "use_cache" in inspect.signature(bare.forward).parameters

    def inputs(self, inputs: Mapping[str, Any], edits: Mapping[int, Edit], check: bool = False) -> Tensor:
        """What the head is given in a forward with these edits of the stream (`sae.hooks.edited`), [B, T, d].

        Args:
            inputs: of the model, with input_ids [B, T].
            edits: layer to function; may be empty.
            check: compare with the model's own logits.

        Raises:
            ConfigError: logits that are not a known function of the head, or no single run of it over all positions.
        """
        given = {"use_cache": False} if self._takes_cache else {}
        with self._watched() as (taken, made), edited(self.model, edits) if edits else nullcontext():
            logits = self.model(**{**given, **inputs}).logits
        if len(taken) != 1 or taken[0].shape[:2] != inputs["input_ids"].shape:
            raise ConfigError(f"{self._name} does not run its head once over all positions; it cannot be scored here")
        if check and not self._agree(self._finished(made[0].to(_wide(logits))), logits):
            raise ConfigError(f"{self._name} does something to its logits, after the head, that is not known here")
        return taken[0]

    def chunks(self, count: int) -> Iterator[slice]:
        """`count` positions, as many at a time as logits fit."""
        rows = max(1, _CHUNK // self._vocabulary)
        return (slice(start, start + rows) for start in range(0, count, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, d], as the head takes it, to [n, V] in float32 (float64 for float64).

        The product too is in that precision where the head is a plain linear layer; another kind of head (with an
        adapter, quantised) runs as it is.
        """
        wide, module = _wide(hidden), self.module
        if type(module) is not nn.Linear:
            return self._finished(module(hidden).to(wide))
        weight, bias = module.weight, module.bias
        hidden = hidden.to(weight.device, wide)
        if weight.dtype == wide:
            return self._finished(F.linear(hidden, weight, bias))
        # widened a block at a time: all the weights of a large head would be gigabytes
        blocks = weight.split(max(1, _CHUNK // weight.shape[1]))
        logits = torch.cat([hidden @ block.to(wide).t() for block in blocks], dim=-1)
        return self._finished(logits if bias is None else logits + bias.to(wide))

    @contextmanager
    def _watched(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """What the head was to be given, whole, and what it made of the last position, which is all that it gets."""
        taken: list[Tensor] = []
        made: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            taken.append(args[0])
            return (args[0][:, -1:], *args[1:])

        def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            made.append(output)

        handles = [self.module.register_forward_pre_hook(before), self.module.register_forward_hook(after)]
        try:
            yield taken, made
        finally:
            for handle in handles:
                handle.remove()

    def _finished(self, logits: Tensor) -> Tensor:
        logits = logits * self._factor
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits

    def _agree(self, ours: Tensor, theirs: Tensor) -> bool:
        # theirs is rounded at each step to the precision of the model
        share = 1e-5 if torch.finfo(theirs.dtype).bits >= 32 else 0.03
        tolerance = share * float(ours.abs().nan_to_num().max())
        return ours.shape == theirs.shape and torch.allclose(
            ours, theirs.to(ours.dtype), rtol=0, atol=tolerance, equal_nan=True
        )


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
