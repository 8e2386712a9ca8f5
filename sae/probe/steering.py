"""Steering: add features to the residual stream, hold them at a value, or take them out, while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sae import hooks
from sae.errors import ConfigError, LayerError, ShapeError
from sae.probe.encoder import check_coders
from sae.topk import TopKSAE

Mode = Literal["add", "set", "ablate"]
#: A callable gets the positions of the forward, [T] int64, and gives bool [T] or [B, T].
Positions = Literal["all", "prompt", "generated"] | Callable[[Tensor], Tensor]


@contextmanager
def steer(
    model: nn.Module,
    coders: Mapping[int, TopKSAE],
    features: Mapping[int, Mapping[int, float] | Collection[int]],
    mode: Mode = "add",
    *,
    relative: bool = False,
    positions: Positions = "all",
    prompt_length: int | None = None,
) -> Iterator[None]:
    """Within the block every forward of the model, `generate` included, runs on an edited residual stream.

    With h the stream at a token of layer L, z = coder.encode(h) (z_j = 0 where j is inactive) and the rows of W_dec in
    units of h per unit of code:

    - "add": h + Σ_j s_j W_dec[j], whether j is active or not. s_j is in the units of the codes, so that s_j = 5 adds
      what a code of 5 stands for. With `relative`: h + ‖h‖ Σ_j s_j W_dec[j] / ‖W_dec[j]‖, s_j in shares of the norm of
      the token's own h.
    - "set": h + Σ_j (s_j - z_j) W_dec[j], every token. What the coder reconstructs then holds s_j of feature j, and
      what it cannot reconstruct (h - ĥ) stays. Encoding the result again need not give s_j back. s_j may be negative.
    - "ablate": "set" with s_j = 0. A token where none of the features is active keeps its h bit for bit.

    Edits of several layers see what the edits below them led to; nested blocks at one layer act from the outside in.

    Args:
        model: a Hugging Face model, with or without its head.
        coders: layer to coder; those of the layers edited are used.
        features: layer to {feature: strength s_j}; for "ablate" a collection of features is enough, and strengths are
            not looked at.
        mode: see above.
        relative: strengths of "add" in shares of ‖h‖.
        positions: which tokens are edited. "prompt" and "generated" tell them apart by `prompt_length` where given.
            Else by the KV cache: a forward over one token with something in the cache is generated, any other is
            prompt. A callable decides by itself; positions count from 0, with padding on the left and cached tokens.
        prompt_length: columns of input_ids that are prompt. Needed without a cache (plain forwards and
            use_cache=False, where each forward runs over everything) and for speculative decoding.

    Raises:
        LayerError: a layer the model or `coders` has not, or none.
        ConfigError: a feature the coder has not, a strength that is no finite number, options that do not go together;
            in the forward: a forward without cache where the prompt's length is needed.
        ShapeError: a coder of another width; in the forward: a callable whose result is not bool [T] or [B, T].
    """
    for layer in features:
        if layer not in coders:
            raise LayerError(f"layer {layer} has no coder; there are coders of {sorted(coders)}")
    check_coders(model, {layer: coders[layer] for layer in features})
    if mode not in ("add", "set", "ablate"):
        raise ConfigError(f"mode {mode!r}: must be 'add', 'set' or 'ablate'")
    if relative and mode != "add":
        raise ConfigError(f"relative strengths go with mode 'add', not {mode!r}: a code has no norm to be a share of")
    where = _Where(positions, prompt_length)
    edits: dict[int, Callable[[Tensor], Tensor]] = {
        layer: _Edit(coders[layer], _strengths(layer, coders[layer], wanted, mode), mode, relative, where)
        for layer, wanted in features.items()
    }
    # before the edits, so that a forward's positions are known when the first of them runs
    handle = hooks.find_blocks(model)[0].register_forward_pre_hook(where.look, with_kwargs=True)
    try:
        with hooks.edited(model, edits):
            yield
    finally:
        handle.remove()


@contextmanager
def ablate(
    model: nn.Module,
    coders: Mapping[int, TopKSAE],
    features: Mapping[int, Collection[int]],
    *,
    positions: Positions = "all",
    prompt_length: int | None = None,
) -> Iterator[None]:
    """`steer` with mode "ablate": h - Σ_j z_j W_dec[j] over the features of each layer, only where they are active."""
    with steer(model, coders, features, "ablate", positions=positions, prompt_length=prompt_length):
        yield


class _Where:
    """Which tokens of the forward at hand are edited."""

    def __init__(self, positions: Positions, prompt_length: int | None) -> None:
        if not callable(positions) and positions not in ("all", "prompt", "generated"):
            raise ConfigError(f"positions {positions!r}: must be 'all', 'prompt', 'generated' or a callable")
        if prompt_length is not None and (prompt_length < 0 or positions not in ("prompt", "generated")):
            raise ConfigError(f"prompt_length {prompt_length} goes with positions 'prompt' or 'generated', from 0 up")
        self._positions, self._prompt_length = positions, prompt_length
        self._past = 0
        self._cached = False

    def look(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Hook of the first block: how many tokens lie in the cache."""
        caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
        self._cached = bool(caches)
        self._past = int(caches[0].get_seq_length()) if caches else 0

    def __call__(self, h: Tensor) -> Tensor:
        """[B, T] bool for h [B, T, d]."""
        shape = h.shape[:2]
        if self._positions == "all":
            return torch.ones(shape, dtype=torch.bool, device=h.device)
        at = torch.arange(self._past, self._past + shape[1], device=h.device)
        if callable(self._positions):
            mask = self._positions(at)
            if mask.dtype != torch.bool or mask.shape not in (shape, shape[1:]):
                raise ShapeError(f"positions gave {mask.dtype} {list(mask.shape)}: must be bool [T] or {list(shape)}")
            return mask.to(h.device).expand(shape)
        if self._prompt_length is not None:
            prompt = at < self._prompt_length
        elif self._cached:
            prompt = torch.full_like(at, shape[1] > 1 or self._past == 0, dtype=torch.bool)
        else:
            raise ConfigError(f"positions {self._positions!r} without a KV cache: give prompt_length, in tokens")
        return (prompt if self._positions == "prompt" else ~prompt).expand(shape)


class _Edit:
    """The edit of one layer, [B, T, d] to [B, T, d]."""

    def __init__(
        self, coder: TopKSAE, strengths: Mapping[int, float], mode: Mode, relative: bool, where: _Where
    ) -> None:
        self._coder, self._mode, self._relative, self._where = coder, mode, relative, where
        device = coder.W_dec.device
        self._features = torch.tensor(list(strengths), dtype=torch.int64, device=device)
        self._strengths = torch.tensor(list(strengths.values()), dtype=torch.float64, device=device)
        self._slots = torch.full((coder.d_sae,), len(strengths), device=device)
        self._slots[self._features] = torch.arange(len(strengths), device=device)

    def __call__(self, h: Tensor) -> Tensor:
        mask = self._where(h)
        dtype = torch.promote_types(h.dtype, self._coder.W_dec.dtype)
        chosen = h[mask].to(self._coder.W_dec.device, dtype)
        rows, strengths = self._coder.W_dec[self._features].to(dtype), self._strengths.to(dtype)
        if self._mode == "add":
            if self._relative:
                after = chosen + torch.linalg.vector_norm(chosen, dim=-1, keepdim=True) * (
                    strengths @ F.normalize(rows, dim=-1)
                )
            else:
                after = chosen + strengths @ rows
        else:
            missing = strengths - self._current(chosen).to(dtype)
            # adding 0 may still change the sign of a zero
            after = torch.where((missing != 0).any(-1, keepdim=True), chosen + missing @ rows, chosen)
        out = h.clone()
        out[mask] = after.to(h)
        return out

    def _current(self, h: Tensor) -> Tensor:
        """z of the features, [N, F]."""
        codes = self._coder.encode(h)
        # one column more for all the features that are not asked about
        found = codes.values.new_zeros(len(h), len(self._features) + 1)
        return found.scatter_add(1, self._slots[codes.indices], codes.values)[:, :-1]


def _strengths(
    layer: int, coder: TopKSAE, wanted: Mapping[int, float] | Collection[int], mode: Mode
) -> dict[int, float]:
    if mode == "ablate":
        wanted = dict.fromkeys(wanted, 0.0)
    if not isinstance(wanted, Mapping):
        raise ConfigError(f"layer {layer}: mode {mode!r} needs a strength for each feature: {{feature: strength}}")
    found: dict[int, float] = {}
    for feature, strength in wanted.items():
        number = feature if isinstance(feature, bool) or not hasattr(feature, "__index__") else feature.__index__()
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < coder.d_sae:
            raise ConfigError(f"layer {layer}: feature {feature!r} is not there; the coder has 0 to {coder.d_sae - 1}")
        try:
            found[number] = float(strength)
        except (TypeError, ValueError):
            raise ConfigError(f"layer {layer}, feature {number}: strength {strength!r} is no number") from None
        if not abs(found[number]) < float("inf"):
            raise ConfigError(f"layer {layer}, feature {number}: strength {strength!r} is not finite")
    return found
