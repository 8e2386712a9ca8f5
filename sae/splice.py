"""Loss recovered: how much a language model loses when reconstructions replace its residual stream.

For next-token cross entropy CE and KL of the clean from the changed distribution,

    loss recovered = (CE_ablated - CE_spliced) / (CE_ablated - CE_clean)

with sums over all tokens before the division: 1 if the reconstruction costs nothing, 0 if it is no better than zeroing
the stream. sae-lens's names are in brackets at the figures.

- Only tokens a coder is meant for are replaced (`sae.harvest.TokenChoice`, sinks by the clean stream), the same ones in
  spliced and ablated runs. (sae-lens ablates every position, which as a rule makes the score higher.)
- The stream at layer L is that of `sae.hooks.hidden_states`. What the model adds at later layers stays.
- Predictions count if their target is a text token (not padding, special or visual) predicted from a token that is not
  padding. (sae-lens leaves out positions by their own token.)
- The head runs over few positions at a time, in at least float32 (`Head`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae.errors import ActivationError, ConfigError
from sae.harvest import TokenChoice, on_device
from sae.hooks import edited, takes
from sae.metrics import Sums
from sae.topk import TopKSAE

#: Logits, or converted weights of the head, held at a time: 2^25 numbers, 128 MB in float32.
_CHUNK = 1 << 25
Edit = Callable[[Tensor], Tensor]

_TOKENS, _REPLACED, _CLEAN, _SPLICED, _ZERO, _KL, _KL_ZERO, _SIZE = range(8)


class LossRecovered(Sums):
    """Figures of one layer, or of several spliced together, in nats per token; `tokens` counts predictions."""

    names = ("replaced", "recovered", "ce_clean", "ce_spliced", "ce_zero", "kl", "kl_zero")

    def __init__(self) -> None:
        super().__init__(_SIZE)

    @property
    def replaced(self) -> int:
        """Number of positions whose stream was replaced, including visual ones."""
        return int(self._sums[_REPLACED])

    @property
    def ce_clean(self) -> float:
        """Cross entropy of the model as it is [ce_loss_without_sae]."""
        return self._mean(_CLEAN)

    @property
    def ce_spliced(self) -> float:
        """With reconstructions in place of the stream [ce_loss_with_sae]."""
        return self._mean(_SPLICED)

    @property
    def ce_zero(self) -> float:
        """With zeros in its place [ce_loss_with_ablation]."""
        return self._mean(_ZERO)

    @property
    def recovered(self) -> float:
        """Loss recovered against zero ablation [ce_loss_score]."""
        zero, spliced, clean = (float(self._sums[which]) for which in (_ZERO, _SPLICED, _CLEAN))
        return (zero - spliced) / (zero - clean) if zero != clean else math.nan

    @property
    def kl(self) -> float:
        """KL(clean ‖ spliced) [kl_div_with_sae]."""
        return self._mean(_KL)

    @property
    def kl_zero(self) -> float:
        """KL(clean ‖ zero-ablated) [kl_div_with_ablation]."""
        return self._mean(_KL_ZERO)


@torch.no_grad()
def loss_recovered(
    model: nn.Module,
    coders: Mapping[int, TopKSAE],
    batches: Iterable[Mapping[str, Any]],
    *,
    special_ids: Collection[int] = (),
    sink_factor: float | None = 10.0,
) -> dict[int | str, LossRecovered]:
    """Run a language model clean, spliced and ablated over the same text.

    Per batch that is one clean forward and, for each layer and for all together, two more.

    Args:
        model: a Hugging Face causal or vision-language model with its head, in eval mode.
        coders: by layer (numbered as in `sae.hooks`).
        batches: inputs of the model as in `sae.harvest.harvest`: input_ids [B, T], optionally attention_mask [B, T],
            and whatever else its forward takes. `labels` and `logits_to_keep` are ignored.
        special_ids, sink_factor: as in `harvest`, of the coders' training.

    Returns:
        Layer to figures; with several coders also "all", every layer spliced (or ablated) at once.

    Raises ConfigError, LayerError or ShapeError for a model `Head` refuses, coders or masks that do not fit, and
    ActivationError for values that are not finite.
    """
    head = Head(model)
    if not coders:
        raise ConfigError("no coder was given")
    choice = TokenChoice(model, special_ids=special_ids, sink_factor=sink_factor)
    groups: dict[int | str, list[int]] = {layer: [layer] for layer in coders}
    if len(coders) > 1:
        groups["all"] = sorted(coders)
    results = {name: LossRecovered() for name in groups}
    for number, batch in enumerate(batches):
        inputs = on_device(model, batch, f"batch {number}")
        for unused in ("labels", "logits_to_keep"):
            inputs.pop(unused, None)
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        states: dict[int, Tensor] = {}
        hidden = head.inputs(inputs, {layer: partial(states.setdefault, layer) for layer in coders}, check=True)
        keep, wanted, visual = choice(ids, mask, states)
        broken = [layer for layer, state in states.items() if not bool(torch.isfinite(state[wanted]).all())]
        if broken:
            where = f"batch {number}: hidden states of layer {broken[0]}"
            raise ActivationError(f"{where} are not finite; load the model in bfloat16 or float32")
        counted = (wanted & ~visual)[:, 1:]
        if mask is not None:
            counted = counted & mask[:, :-1].bool()
        if not bool(counted.any()):
            continue
        states.clear()
        targets, clean = ids[:, 1:][counted], hidden[:, :-1][counted]
        for name, layers in groups.items():
            runs: list[dict[int, Edit]] = [
                {layer: _replace(keep, coders[layer]) for layer in layers},
                {layer: _replace(keep, None) for layer in layers},
            ]
            try:
                changed = [head.inputs(inputs, edits)[:, :-1][counted] for edits in runs]
            except ActivationError as error:
                raise ActivationError(f"batch {number}, layer {name}: {error}") from None
            results[name]._sums += _figures(head, targets, clean, changed, int(keep.sum()))
            if not bool(torch.isfinite(results[name]._sums).all()):
                raise ActivationError(f"batch {number}: the loss with layer {name} replaced is not finite")
    return results


def _replace(keep: Tensor, coder: TopKSAE | None) -> Edit:
    """Replace the kept tokens by their reconstruction, or by zeros, and leave the others."""

    def replace(h: Tensor) -> Tensor:
        out, where = h.clone(), keep.to(h.device)
        out[where] = h.new_zeros(()) if coder is None else coder(h[where].to(coder.W_enc.device)).to(h)
        return out

    return replace


def _figures(head: Head, targets: Tensor, clean: Tensor, changed: list[Tensor], replaced: int) -> Tensor:
    """The sums of one batch. clean and the two of changed: [n, d] as the head takes them; targets: [n]."""
    sums = torch.zeros(_SIZE, dtype=torch.float64, device=clean.device)
    sums[_TOKENS], sums[_REPLACED] = len(targets), replaced
    for rows in head.chunks(len(targets)):
        target = targets[rows].to(clean.device)
        before = F.log_softmax(head.logits(clean[rows]), dim=-1)
        sums[_CLEAN] += F.nll_loss(before, target, reduction="none").double().sum()
        for ce, kl, hidden in zip((_SPLICED, _ZERO), (_KL, _KL_ZERO), changed, strict=True):
            after = F.log_softmax(head.logits(hidden[rows]), dim=-1)
            sums[ce] += F.nll_loss(after, target, reduction="none").double().sum()
            sums[kl] += (before.exp() * (before - after)).sum(-1).double().sum()
    return sums.cpu()


class Head:
    """The head of a causal or vision-language model, run apart from it in chunks and in at least float32.

    Logits of whole texts would take gigabytes. So in a forward the head runs on the last position alone, its input for
    all positions is kept, and logits are computed from that in chunks. What some models do to the logits afterwards
    (softcapping of Gemma, scales of Cohere, Granite and Falcon-H1) is repeated here and compared with the model's own
    logits of its last position; other models are refused.

    Raises ConfigError for a model without a language-model head, not causal, or in training mode.
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

    def inputs(self, inputs: Mapping[str, Any], edits: Mapping[int, Edit], check: bool = False) -> Tensor:
        """The input of the head, [B, T, d], in a forward with these edits of the stream (`sae.hooks.edited`), or none.

        With `check`, logits are compared with the model's own. Raises ConfigError for logits that are not a known
        function of the head, or no single run of it over all positions.
        """
        defaults = {"use_cache": False} if takes(self.model, "use_cache") else {}
        with self._recording() as (head_inputs, outputs), edited(self.model, edits) if edits else nullcontext():
            logits = self.model(**{**defaults, **inputs}).logits
        if len(head_inputs) != 1 or head_inputs[0].shape[:2] != inputs["input_ids"].shape:
            raise ConfigError(f"{self._name} does not run its head once over all positions; it cannot be scored here")
        if check and not _agree(self._finished(outputs[0].to(_wide(logits))), logits):
            raise ConfigError(f"{self._name} does something to its logits, after the head, that is not known here")
        return head_inputs[0]

    def chunks(self, count: int) -> Iterator[slice]:
        """Slices of `count` positions, each short enough for the logits to fit."""
        rows = max(1, _CHUNK // self._vocabulary)
        return (slice(start, start + rows) for start in range(0, count, rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [n, d], as the head takes it, to logits [n, V] in float32 (float64 for float64).

        A plain linear head computes in that precision; another kind (with an adapter, quantised) runs as it is.
        """
        wide, module = _wide(hidden), self.module
        if type(module) is not nn.Linear:
            return self._finished(module(hidden).to(wide))
        weight, bias = module.weight, module.bias
        hidden = hidden.to(weight.device, wide)
        if weight.dtype == wide:
            return self._finished(F.linear(hidden, weight, bias))
        # converted a block at a time, since a large head takes gigabytes
        blocks = weight.split(max(1, _CHUNK // weight.shape[1]))
        logits = torch.cat([hidden @ block.to(wide).t() for block in blocks], dim=-1)
        return self._finished(logits if bias is None else logits + bias.to(wide))

    @contextmanager
    def _recording(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Record the whole inputs of the head, which runs on their last position only, and its outputs."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            inputs.append(args[0])
            return (args[0][:, -1:], *args[1:])

        def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            outputs.append(output)

        handles = [self.module.register_forward_pre_hook(before), self.module.register_forward_hook(after)]
        try:
            yield inputs, outputs
        finally:
            for handle in handles:
                handle.remove()

    def _finished(self, logits: Tensor) -> Tensor:
        logits = logits * self._factor
        return torch.tanh(logits / self._cap) * self._cap if self._cap else logits


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    # the model's own are rounded at each step to its precision
    tolerance = (1e-5 if torch.finfo(theirs.dtype).bits >= 32 else 0.03) * float(ours.abs().nan_to_num().max())
    theirs = theirs.to(ours.dtype)
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=tolerance, equal_nan=True)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
