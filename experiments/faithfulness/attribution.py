"""What turns the answer depends on by the model's own account: attention, and gradient times input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experiments.faithfulness.logprob import check_length, logprobs, only_last, placed
from experiments.faithfulness.turns import Prompt, prompt_of, x0_of
from remind.core.errors import ConfigError, ModelError
from remind.states.parquet import StateRecord
from remind.states.pyramid import Rendered
from sae.hooks import find_blocks

if TYPE_CHECKING:
    from remind.models.backbone import Backbone

#: Answer positions whose attention is held at once; that of 8K tokens, 36 layers and 32 heads is then below 2 GB.
_ROWS = 64


@torch.no_grad()
def attention_to_turns(
    backbone: Backbone, state: StateRecord | Rendered | Prompt, target_ids: Sequence[int], layers: int | None = None
) -> Tensor:
    """Attention that goes to the tokens of each turn from the positions that predict the answer.

    The prompt is read with the model's usual attention into a key-value cache; eager attention, which alone gives
    weights, is switched on for the answer's positions only.

    Args:
        state: record, rendered x0, or its located tokens.
        target_ids: [L].
        layers: average over so many last layers; None: all.

    Returns:
        [n_turns] on the CPU: sum over a turn's tokens of the mean over layers, heads and the L positions. At most 1 in
        all, since instructions, question and the answer itself get attention too.

    Raises:
        ConfigError: more layers than there are.
        DataError: longer than the model takes.
        ModelError: a model that gives no attention weights, or keeps no cache.
    """
    if layers is not None and not 1 <= layers <= backbone.n_layers:
        raise ConfigError(f"attention of the last {layers} layers: {backbone.name} has {backbone.n_layers}")
    prompt = _prompt(backbone, state)
    check_length(backbone, len(prompt.ids), len(target_ids))
    ids = torch.tensor([[*prompt.ids, *target_ids[:-1]]])
    inputs = placed(backbone, {"input_ids": ids})
    start, total = len(prompt.ids) - 1, ids.shape[1]

    def piece(first: int, last: int) -> dict[str, Tensor]:
        return {name: value[..., first:last] for name, value in inputs.items()}

    model = backbone.model
    cache = model(**piece(0, start), **only_last(model, 1), use_cache=True).past_key_values if start else None
    if start and cache is None:
        raise ModelError(f"{backbone.name} keeps no key-value cache; attention of the answer cannot be read")
    mass = torch.zeros(total, dtype=torch.float64, device=backbone.device)
    with eager(model):
        for first in range(start, total, _ROWS):
            last = min(first + _ROWS, total)
            output = model(
                **piece(first, last),
                **only_last(model, 1),
                past_key_values=cache,
                use_cache=True,
                output_attentions=True,
            )
            cache = output.past_key_values
            mass += _column_mass(backbone, output.attentions, layers, last, total)
    return prompt.per_turn(mass[: len(prompt.ids)] / len(target_ids))


def _column_mass(
    backbone: Backbone, attentions: Sequence[Tensor | None] | None, layers: int | None, last: int, total: int
) -> Tensor:
    """Σ over positions of the mean over layers and heads, for each of `total` tokens.

    Args:
        attentions: by layer [1, H, rows, K]; the K keys end before token `last`. K is smaller where the cache of a
            sliding window has let go of the first tokens.
    """
    if not attentions or any(weights is None for weights in attentions):
        raise ModelError(f"{backbone.name} gives no attention weights, not even with eager attention")
    mass = torch.zeros(total, dtype=torch.float64, device=backbone.device)
    chosen = [weights for weights in attentions[-(layers or 0) :] if weights is not None]
    for weights in chosen:
        columns = weights[0].double().mean(0).sum(0)
        mass[last - len(columns) : last] += columns.to(mass.device)
    return mass / len(chosen)


@contextmanager
def eager(model: Any) -> Iterator[None]:
    """Eager attention within the block, and what each part of the model had before after it."""
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation("eager")
        yield
    finally:
        # outer configurations first: they hand theirs down
        for config, implementation in before:
            config._attn_implementation = implementation


def gradient_times_input(
    backbone: Backbone, state: StateRecord | Rendered | Prompt, target_ids: Sequence[int]
) -> Tensor:
    """Gradient × input of the answer's log-probability, by turn.

    With e_t the embedding of token t, and g_t the gradient of the summed log-probability of the target for it, a turn
    gets Σ over its tokens of |Σ_d g_t[d] e_t[d]|. Blocks are computed again in the backward pass, so that memory is
    about that of one block's graph; the model's own gradients are left alone.

    Args:
        state: record, rendered x0, or its located tokens.
        target_ids: [L].

    Returns:
        [n_turns] on the CPU, in nats.

    Raises:
        DataError: longer than the model takes.
    """
    prompt = _prompt(backbone, state)
    check_length(backbone, len(prompt.ids), len(target_ids))
    ids = torch.tensor([[*prompt.ids, *target_ids[:-1]]])
    leaves: list[Tensor] = []

    def leaf(_: Any, __: Any, output: Tensor) -> Tensor:
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    handle = backbone.model.get_input_embeddings().register_forward_hook(leaf)
    try:
        with torch.enable_grad(), recomputed(backbone.model):
            total = logprobs(backbone, {"input_ids": ids}, target_ids).sum()
            (gradient,) = torch.autograd.grad(total, leaves[:1])
    finally:
        handle.remove()
    shares = (gradient.double() * leaves[0].detach().double()).sum(-1)[0].abs()
    return prompt.per_turn(shares[: len(prompt.ids)])


@contextmanager
def recomputed(model: Any) -> Iterator[None]:
    """Activations inside blocks are computed again in the backward pass; nothing else of training mode is switched on.

    Without effect on models that do not support it.
    """
    on = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
    if on or not getattr(model, "supports_gradient_checkpointing", False):
        yield
        return
    # the names of transformers before and after 5.20
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    blocks = [block for block in find_blocks(model) if not block.training]
    enable({"use_reentrant": False})
    try:
        # transformers recomputes blocks in training mode only; their parts stay in eval mode, without dropout
        for block in blocks:
            block.training = True
        yield
    finally:
        for block in blocks:
            block.training = False
        disable()


def _prompt(backbone: Backbone, state: StateRecord | Rendered | Prompt) -> Prompt:
    return state if isinstance(state, Prompt) else prompt_of(backbone.tokenizer, x0_of(state))
