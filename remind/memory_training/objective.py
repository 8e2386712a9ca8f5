"""The losses: GRPO with MemBuilder's weights (Eq. 11-12) and SaliMory's contrastive terms (Eq. 5-6); and the
log-probabilities that they are made of.

Completions of the same prompt stand in one row, so that a forward pass reads the prompt once and not once a rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.checkpoint import checkpoint

from remind.alignment.objective import accumulation_dtype
from remind.alignment.step import body_of, head_of

Weighting = Literal["advantage", "printed"]
#: Models of plain causal attention, which a mask and positions say all about.
KINDS = ("llama", "qwen2", "qwen3")
#: Logits that exist at once.
LOGITS = 2**26


def advantages(rewards: Sequence[float], epsilon: float = 1e-4) -> list[float]:
    """Advantages of one group of rollouts: (r − mean) / (σ + ε) (MemBuilder, Eq. 11; σ with Bessel's correction).

    Args:
        rewards: one per rollout, two at least. A NaN is a reward that could not be had: the whole group then has
            advantage 0.

    Returns:
        One per rollout; all 0 where the rewards do not differ.
    """
    values = torch.tensor(rewards, dtype=torch.float64)
    if values.isnan().any() or (values == values[0]).all():
        return [0.0] * values.numel()
    return ((values - values.mean()) / (values.std() + epsilon)).tolist()  # type: ignore[no-any-return]


def k3(logp: Tensor, ref: Tensor) -> Tensor:
    """Estimate of KL(π_θ ‖ π_ref) from tokens of π_θ, never negative: exp(d) − d − 1, d = log π_ref − log π_θ."""
    difference = ref - logp
    return difference.exp() - difference - 1


def surrogate(ratio: Tensor, advantage: Tensor, weight: Tensor, clip: float, weighting: Weighting) -> Tensor:
    """The clipped surrogate with the weight w of a role (MemBuilder, Eq. 12), elementwise; to be maximised.

    `advantage`: w · min(ρA, clip(ρ) A), what Section 3.4.2 describes and the released code does. `printed`:
    min(w ρA, clip(ρ) A), in which w > 1 amplifies negative advantages alone, and shifts the lower bound of the clip.
    """
    clipped = ratio.clamp(1 - clip, 1 + clip) * advantage
    if weighting == "printed":
        return torch.minimum(weight * ratio * advantage, clipped)
    return weight * torch.minimum(ratio * advantage, clipped)


def grpo_loss(
    logp: Tensor,
    old: Tensor,
    ref: Tensor | None,
    mask: Tensor,
    advantage: Tensor,
    weight: Tensor,
    clip: float = 0.2,
    beta: float = 0.0,
    weighting: Weighting = "advantage",
) -> Tensor:
    """Loss of each trace: mean over its tokens of −surrogate + β k3. Ratios are to π_old, the KL is to π_ref.

    Args:
        logp: [B, T] log-probabilities under the present policy, with gradient.
        old: [B, T] under the policy that sampled.
        ref: [B, T] under the reference; None with β = 0.
        mask: [B, T], 1 at tokens that count; a row without any has loss 0.
        advantage: [B].
        weight: [B], the w of the trace's role.

    Returns:
        [B].
    """
    loss = -surrogate((logp - old).exp(), advantage[:, None], weight[:, None], clip, weighting)
    if ref is not None:
        loss = loss + beta * k3(logp, ref)
    return (loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)


def contrastive_loss(
    logp: Tensor, mask: Tensor, winner: Tensor, loser: Tensor, gap: float, scale: float = 0.15
) -> Tensor:
    """Δ · softplus(−(s_w − s_l) / η) of one pair (SaliMory, Eq. 5; the form is open in the paper).

    s is the mean log-probability per token over a rollout's traces of the role.

    Args:
        logp, mask: [B, T], as of `grpo_loss`.
        winner, loser: [n] rows of the two rollouts.
        gap: Δ, by which the winner is better.
        scale: η.

    Returns:
        [].
    """
    better, worse = ((logp[rows] * mask[rows]).sum() / mask[rows].sum().clamp(min=1) for rows in (winner, loser))
    return gap * softplus(-(better - worse) / scale)


# log-probabilities


class Packed(NamedTuple):
    """N distinct prompts, each in a row with all its completions, of B in all; or B prompts with one completion each.

    A completion stands there as the last token of its prompt and all of its own but the last: what predicts it.

    Attributes:
        ids: [N, L], padded on the right.
        positions: [N, L]; None: as they stand.
        visible: [N, 1, L, L], whether a token (third axis) attends to another: of its own completion or of the prompt.
            None: to all before it.
        targets: [B, T], the completions.
        mask: [B, T], 1 at their tokens.
        places: [B, T], where in the flattened rows each of them is predicted; 0 behind the end.
    """

    ids: Tensor
    positions: Tensor | None
    visible: Tensor | None
    targets: Tensor
    mask: Tensor
    places: Tensor


def pack(prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], pad: int, share: bool) -> Packed:
    """Pack B prompts and their completions.

    Args:
        share: put completions of the same prompt in a row, unless attention would then be no less work.
    """
    groups: dict[Any, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(tuple(prompt) if share else row, []).append(row)
    longest = max(map(len, completions))
    width = max(len(prompts[rows[0]]) - 1 + sum(len(completions[row]) for row in rows) for rows in groups.values())
    if share and len(groups) * width**2 >= len(prompts) * (max(map(len, prompts)) + longest) ** 2:
        return pack(prompts, completions, pad, share=False)
    shape = (len(groups), width)
    ids, positions, owners = torch.full(shape, pad), torch.zeros(shape, dtype=torch.long), torch.full(shape, -1)
    targets, places = (torch.zeros(len(prompts), longest, dtype=torch.long) for _ in range(2))
    mask = torch.zeros(len(prompts), longest)
    for n, rows in enumerate(groups.values()):
        *before, last = prompts[rows[0]]
        end = len(before)
        ids[n, :end], positions[n, :end], owners[n, :end] = torch.tensor(before), torch.arange(end), 0
        for number, row in enumerate(rows, 1):
            own = completions[row]
            here, count = slice(end, end + len(own)), len(own)
            ids[n, here] = torch.tensor([last, *own][:count])
            positions[n, here], owners[n, here] = len(before) + torch.arange(count), number
            targets[row, :count], mask[row, :count] = torch.tensor(own), 1
            places[row, :count] = n * width + end + torch.arange(count)
            end = here.stop
    if not share:
        return Packed(ids, None, None, targets, mask, places)
    same = (owners[:, :, None] == owners[:, None, :]) | (owners[:, None, :] == 0)
    visible = same & torch.ones(width, width, dtype=torch.bool).tril()
    return Packed(ids, positions, visible[:, None], targets, mask, places)


def can_share(config: Any) -> bool:
    """Whether a model with this configuration takes `Packed.visible` as its mask."""
    plain = getattr(config, "sliding_window", None) is None and getattr(config, "_attn_implementation", "") == "sdpa"
    return plain and config.model_type in KINDS


class PolicyModel(nn.Module):
    """A language model whose forward gives log-probabilities of completions [B, T], 0 behind their ends.

    The head is read inside the forward, so that the hooks of DDP see its weight in use, and some positions at a time.

    Args:
        temperature: of sampling.
    """

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, packed: Packed) -> Tensor:
        body, head, counted = body_of(self.model), head_of(self.model), packed.mask > 0
        hidden = body(
            input_ids=packed.ids, attention_mask=packed.visible, position_ids=packed.positions, use_cache=False
        ).last_hidden_state
        states = hidden.flatten(0, 1)[packed.places[counted]]
        with torch.autocast(states.device.type, enabled=False):
            wide = head.wide(accumulation_dtype(states.dtype))
            size = max(LOGITS // len(head.weight), 1)
            parts = zip(states.split(size), packed.targets[counted].split(size), strict=True)
            found = [checkpoint(self._log_p, wide, *part, use_reentrant=False) for part in parts]
        return torch.zeros_like(packed.mask, dtype=wide.weight.dtype).masked_scatter(counted, torch.cat(found))

    def _log_p(self, head: Any, states: Tensor, targets: Tensor) -> Tensor:
        return -cross_entropy(head.logits(states) / self.temperature, targets, reduction="none")
