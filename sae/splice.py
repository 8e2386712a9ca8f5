"""Loss recovered: what a language model loses when reconstructions take the place of its residual stream.

For next-token cross entropy CE and KL of the clean from the changed distribution,

    loss recovered = (CE_ablated - CE_spliced) / (CE_ablated - CE_clean)

with sums over all tokens before the division: 1 where the reconstruction costs nothing, 0 where it is no better than
removing the stream. sae-lens's names are in brackets at the figures.

- Replaced are only tokens a coder is meant for (`sae.harvest.TokenChoice`: no padding, special tokens or sinks), the
  same ones in spliced and ablated runs, text and visual alike. (sae-lens ablates every position, which as a rule
  makes the denominator larger and the score higher.) Sinks are judged on the clean stream.
- The stream at layer L is the one that `sae.hooks.hidden_states` reads: DeepStack's features for that layer are in it.
  What the model adds at later layers stays, also in ablated runs.
- Counted are predictions whose target is a text token of interest: not padding, not special, not visual, and predicted
  from a token that is not padding. (sae-lens leaves out positions by their own token instead of by the target.)
- The head is run over few positions at a time, in at least float32 (`sae.head`): logits of a whole text never exist.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae.errors import ActivationError, ConfigError, ShapeError
from sae.harvest import TokenChoice
from sae.head import Edit, Head
from sae.hooks import device_of
from sae.metrics import Sums
from sae.topk import TopKSAE

#: Entry of all layers spliced together.
ALL = "all"

_TOKENS, _REPLACED, _CLEAN, _SPLICED, _ZERO, _MEAN, _KL, _KL_ZERO, _SIZE = range(9)


class LossRecovered(Sums):
    """Figures of one layer, or of several spliced together; in nats per token. One that is not defined is nan.

    Sums can be added over processes and merged, as those of `sae.metrics`.
    """

    def __init__(self, mean_ablation: bool = False) -> None:
        super().__init__(_SIZE)
        self.mean_ablation = mean_ablation

    @property
    def tokens(self) -> int:
        """Predictions counted."""
        return int(self._sums[_TOKENS])

    @property
    def replaced(self) -> int:
        """Positions whose stream was replaced, visual ones included."""
        return int(self._sums[_REPLACED])

    @property
    def ce_clean(self) -> float:
        """Cross entropy of the model as it is [ce_loss_without_sae]."""
        return self._per_token(_CLEAN)

    @property
    def ce_spliced(self) -> float:
        """With reconstructions in place of the stream [ce_loss_with_sae]."""
        return self._per_token(_SPLICED)

    @property
    def ce_zero(self) -> float:
        """With zeros in its place [ce_loss_with_ablation]."""
        return self._per_token(_ZERO)

    @property
    def ce_mean(self) -> float:
        """With the mean in its place; nan unless asked for."""
        return self._per_token(_MEAN) if self.mean_ablation else math.nan

    @property
    def recovered(self) -> float:
        """Loss recovered against zero ablation [ce_loss_score]."""
        return self._share(_ZERO)

    @property
    def recovered_mean(self) -> float:
        """Loss recovered against mean ablation: stricter, as the mean explains much of the stream; nan unless asked."""
        return self._share(_MEAN) if self.mean_ablation else math.nan

    @property
    def kl(self) -> float:
        """KL(clean ‖ spliced) [kl_div_with_sae]."""
        return self._per_token(_KL)

    @property
    def kl_zero(self) -> float:
        """KL(clean ‖ zero-ablated) [kl_div_with_ablation]."""
        return self._per_token(_KL_ZERO)

    def summary(self) -> dict[str, Any]:
        """All figures as plain JSON values; None where one is not defined."""
        names = ("recovered", "recovered_mean", "ce_clean", "ce_spliced", "ce_zero", "ce_mean", "kl", "kl_zero")
        figures = {name: getattr(self, name) for name in names}
        return {
            "tokens": self.tokens,
            "replaced": self.replaced,
            **{name: value if math.isfinite(value) else None for name, value in figures.items()},
        }

    def _per_token(self, which: int) -> float:
        return float(self._sums[which]) / self.tokens if self.tokens else math.nan

    def _share(self, ablated: int) -> float:
        worst, spliced, clean = (float(self._sums[which]) for which in (ablated, _SPLICED, _CLEAN))
        return (worst - spliced) / (worst - clean) if worst != clean else math.nan

    def _sizes(self) -> tuple[int, ...]:
        return (_SIZE, int(self.mean_ablation))


@torch.no_grad()
def loss_recovered(
    model: nn.Module,
    coders: Mapping[int, TopKSAE],
    batches: Iterable[Mapping[str, Any]],
    *,
    special_ids: Collection[int] = (),
    visual_ids: Collection[int] | None = None,
    sink_factor: float | None = 10.0,
    mean: Literal["batch"] | Mapping[int, Tensor] | None = None,
    allow_empty: bool = False,
) -> dict[int | str, LossRecovered]:
    """Run a language model clean, spliced and ablated over the same text.

    Per batch that is one clean forward and, for each layer and for all together, two more (three with `mean`).

    Args:
        model: a Hugging Face causal or vision-language model with its head, in eval mode.
        coders: by layer (numbered as in `sae.hooks`).
        batches: inputs of the model as in `sae.harvest.harvest`: input_ids [B, T], optionally attention_mask [B, T],
            and whatever else its forward takes. `labels` and `logits_to_keep` are ignored.
        special_ids, visual_ids, sink_factor: as in `harvest`; those the coders were trained with.
        mean: also ablate to a mean: "batch", that of the replaced tokens of the batch, or layer to [d_in].
        allow_empty: give figures of no tokens instead of raising; for processes that share the batches.

    Returns:
        Layer to figures; with several coders also "all", every layer spliced (or ablated) at once, where upper coders
        read what lower ones led to.

    Raises:
        ConfigError: a model without a language-model head, one that is not causal, one in training mode, or one whose
            logits are no known function of its head; no coders; a mean that lacks a layer.
        ActivationError: values that are not finite, naming the batch; nothing to predict.
        LayerError, ShapeError: a layer the model has not; a coder, mask or mean of another shape.
    """
    head = Head(model)
    if not coders:
        raise ConfigError("there is no coder to splice in")
    if isinstance(mean, Mapping) and (missing := sorted(set(coders) - set(mean))):
        raise ConfigError(f"mean holds no vector for layer {missing[0]}; give one for each coder")
    choice = TokenChoice(model, special_ids=special_ids, visual_ids=visual_ids, sink_factor=sink_factor)
    groups: dict[int | str, list[int]] = {layer: [layer] for layer in coders}
    if len(coders) > 1:
        groups[ALL] = sorted(coders)
    results = {name: LossRecovered(mean is not None) for name in groups}
    for number, batch in enumerate(batches):
        inputs = {
            name: value.to(device_of(model)) if isinstance(value, Tensor) else value
            for name, value in batch.items()
            if name not in ("labels", "logits_to_keep")
        }
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if mask is not None and mask.shape != ids.shape:
            raise ShapeError(f"batch {number}: attention_mask {list(mask.shape)} for input_ids {list(ids.shape)}")
        states: dict[int, Tensor] = {}
        hidden = head.inputs(inputs, {layer: _record(states, layer) for layer in coders}, check=True)
        keep, wanted, visual = choice(ids, mask, states)
        broken = [layer for layer, state in states.items() if not bool(torch.isfinite(state[wanted]).all())]
        if broken:
            raise ActivationError(
                f"batch {number}: hidden states of layer {broken[0]} are not finite; load the model in bfloat16 or "
                "float32"
            )
        counted = (wanted & ~visual)[:, 1:]
        if mask is not None:
            counted = counted & mask[:, :-1].bool()
        if not bool(counted.any()):
            continue
        means = {layer: _mean(state[keep], mean, layer) for layer, state in states.items()} if mean else {}
        states.clear()
        targets, clean = ids[:, 1:][counted], hidden[:, :-1][counted]
        for name, layers in groups.items():
            runs: list[dict[int, Edit]] = [
                {layer: _replace(keep, _reconstruct(coders[layer])) for layer in layers},
                {layer: _replace(keep, torch.zeros_like) for layer in layers},
            ]
            if mean:
                runs.append({layer: _replace(keep, means[layer].expand_as) for layer in layers})
            try:
                changed = [head.inputs(inputs, edits)[:, :-1][counted] for edits in runs]
            except ActivationError as error:
                raise ActivationError(f"batch {number}, layer {name}: {error}") from None
            results[name]._sums += _figures(head, targets, clean, changed, int(keep.sum()))
            if not bool(torch.isfinite(results[name].sums()).all()):
                raise ActivationError(f"batch {number}: the loss with layer {name} replaced is not finite")
    if not allow_empty and not all(result.tokens for result in results.values()):
        raise ActivationError("nothing to predict: no text token follows another in these batches")
    return results


def _record(states: dict[int, Tensor], layer: int) -> Edit:
    def record(h: Tensor) -> Tensor:
        states[layer] = h
        return h

    return record


def _replace(keep: Tensor, make: Edit) -> Edit:
    """Change the kept tokens by make: [N, d] to [N, d], and leave the others."""

    def replace(h: Tensor) -> Tensor:
        after, where = h.clone(), keep.to(h.device)
        after[where] = make(h[where]).to(h)
        return after

    return replace


def _reconstruct(coder: TopKSAE) -> Edit:
    return lambda h: coder(h.to(coder.W_enc.device))


def _mean(kept: Tensor, mean: Literal["batch"] | Mapping[int, Tensor], layer: int) -> Tensor:
    if not isinstance(mean, Mapping):
        return kept.double().mean(0)
    if mean[layer].shape != kept.shape[1:]:
        raise ShapeError(f"mean of layer {layer} is {list(mean[layer].shape)}, the stream has {list(kept.shape[1:])}")
    return mean[layer].to(kept.device)


def _figures(head: Head, targets: Tensor, clean: Tensor, changed: list[Tensor], replaced: int) -> Tensor:
    """The sums of one batch. clean, changed: [n, d] as the head takes them; targets: [n]."""
    sums = torch.zeros(_SIZE, dtype=torch.float64, device=clean.device)
    sums[_TOKENS], sums[_REPLACED] = len(targets), replaced
    for rows in head.chunks(len(targets)):
        target = targets[rows].to(clean.device)
        before = F.log_softmax(head.logits(clean[rows]), dim=-1)
        sums[_CLEAN] += F.nll_loss(before, target, reduction="none").double().sum()
        for which, hidden in zip((_SPLICED, _ZERO, _MEAN), changed, strict=False):
            after = F.log_softmax(head.logits(hidden[rows]), dim=-1)
            sums[which] += F.nll_loss(after, target, reduction="none").double().sum()
            if which != _MEAN:
                kl = (before.exp() * (before - after)).sum(-1)
                sums[_KL if which == _SPLICED else _KL_ZERO] += kl.double().sum()
    return sums.cpu()
