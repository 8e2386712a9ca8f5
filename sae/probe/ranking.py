"""The tokens with the largest activations of every feature, and what stands round them, in tensors of fixed size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor

from sae.errors import ConfigError, ShapeError
from sae.topk import SparseCodes

#: Contexts looked up at a time.
_CHUNK = 1 << 15


class Tokens:
    """The tokens of some whole texts, one after the other.

    Args:
        ids: [N] int64.
        lengths: tokens of each text.
        codes: of the N tokens; on tokens that do not count all values are 0.
        d_sae: features of the coder.

    Raises:
        ShapeError: a feature beyond d_sae.
    """

    def __init__(self, ids: Tensor, lengths: Sequence[int], codes: SparseCodes, d_sae: int) -> None:
        self.ids, self.codes, self.d_sae = ids, codes, d_sae
        if codes.indices.numel() and not 0 <= int(codes.indices.min()) <= int(codes.indices.max()) < d_sae:
            raise ShapeError(f"feature {int(codes.indices.max())} in the codes; these are examples of 0 to {d_sae - 1}")
        sizes = torch.tensor(lengths, dtype=torch.int64)
        self.ends = sizes.cumsum(0)
        self.starts = self.ends - sizes
        self.text = torch.repeat_interleave(torch.arange(len(sizes)), sizes)

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor]:
        """token x d_sae + feature, ascending, and the values."""
        keys = (torch.arange(len(self.ids))[:, None] * self.d_sae + self.codes.indices).reshape(-1)
        values = self.codes.values.reshape(-1)
        # coders give the features of a token in ascending order
        if bool((keys.diff() < 0).any()):
            keys, order = keys.sort()
            values = values[order]
        return keys, values

    def around(self, token: Tensor, feature: Tensor, context: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """ids [n, W], -1 beyond the ends of a text, and activations [n, W] of the feature; W = left + 1 + right."""
        keys, values = self._entries
        window = token[:, None] + torch.arange(-context[0], context[1] + 1)
        text = self.text[token][:, None]
        inside = (window >= self.starts[text]) & (window < self.ends[text])
        window = window.clamp(0, len(self.ids) - 1)
        wanted = window * self.d_sae + feature[:, None]
        found = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        hit = inside & (keys[found] == wanted)
        return torch.where(inside, self.ids[window], -1), torch.where(hit, values[found], 0)


class Ranking:
    """For each feature the `most` tokens with the largest activations, by falling value; the earliest of equals first.

    Attributes:
        value: [d_sae, most] float64; 0 where there is none yet.
        source: [d_sae, most] int64, number of the text; -1 where there is none yet.
        position: [d_sae, most] int64, of the token in its text.
    """

    def __init__(self, d_sae: int, most: int, context: tuple[int, int], distinct_texts: bool) -> None:
        if d_sae < 1 or most < 1 or min(context) < 0:
            raise ConfigError(f"d_sae {d_sae}, per_feature {most}: must be at least 1; context {context}: at least 0")
        self.d_sae, self.most, self.context, self.distinct_texts = d_sae, most, context, distinct_texts
        width = sum(context) + 1
        self.value = torch.zeros(d_sae, most, dtype=torch.float64)
        self.source = torch.full((d_sae, most), -1)
        self.position = torch.zeros(d_sae, most, dtype=torch.int64)
        # contexts stay where they were written, and _slot says where, so that little moves when ranks change
        self._slot = torch.arange(most).repeat(d_sae, 1)
        self._ids = torch.full((d_sae, most, width), -1, dtype=torch.int32)
        self._around = torch.zeros(d_sae, most, width)

    def add(self, tokens: Tokens, first: int) -> None:
        """Tokens of texts that are numbered from `first`."""
        active = tokens.codes.active()
        # what is no larger than the last of a full list cannot enter it: equal values came earlier
        take = active & (tokens.codes.values.double() > self.value[:, -1][tokens.codes.indices])
        if not bool(take.any()):
            return
        feature, value = tokens.codes.indices[take], tokens.codes.values[take].double()
        token = torch.arange(len(tokens.ids))[:, None].expand_as(take)[take]
        # every sort is stable, so that by falling value, and among equals by order of coming, holds within any group
        value, order = value.sort(descending=True, stable=True)
        feature, token = feature[order], token[order]
        if self.distinct_texts:
            pair, order = (feature * len(tokens.starts) + tokens.text[token]).sort(stable=True)
            new = torch.ones_like(pair, dtype=torch.bool)
            new[1:] = pair[1:] != pair[:-1]
            kept = order[new].sort().values
            feature, value, token = feature[kept], value[kept], token[kept]
        feature, order = feature.sort(stable=True)
        value, token = value[order], token[order]
        rows, group, count = feature.unique_consecutive(return_inverse=True, return_counts=True)
        rank = torch.arange(len(feature)) - (count.cumsum(0) - count)[group]
        near = rank < self.most
        candidates = value.new_zeros(len(rows), self.most)
        candidates[group[near], rank[near]] = value[near]
        owners = torch.zeros(len(rows), self.most, dtype=torch.int64)
        owners[group[near], rank[near]] = token[near]
        self._merge(rows, candidates, owners, tokens, first)

    def _merge(self, rows: Tensor, candidates: Tensor, token: Tensor, tokens: Tokens, first: int) -> None:
        """rows: features; candidates, token: [rows, most], by falling value, 0 where there is none."""
        # what is there stands before what comes, so that it wins among equals
        value, order = torch.cat([self.value[rows], candidates], 1).sort(dim=1, descending=True, stable=True)
        value, order = value[:, : self.most], order[:, : self.most]
        fresh = order >= self.most
        row = torch.arange(len(rows))[:, None].expand_as(order)
        came, owner = token[row[fresh], order[fresh] - self.most], rows[row[fresh]]
        gone = torch.ones_like(fresh)
        gone[row[~fresh], order[~fresh]] = False
        # as many are gone from a row as came into it, and both are listed row by row
        free = self._slot[rows][gone]
        old = order.clamp(max=self.most - 1)
        slot, source, position = (x[rows].gather(1, old) for x in (self._slot, self.source, self.position))
        slot[fresh] = free
        source[fresh] = tokens.text[came] + first
        position[fresh] = came - tokens.starts[tokens.text[came]]
        self.value[rows], self._slot[rows], self.source[rows], self.position[rows] = value, slot, source, position
        for part in torch.arange(len(came)).split(_CHUNK):
            ids, around = tokens.around(came[part], owner[part], self.context)
            self._ids[owner[part], free[part]] = ids.int()
            self._around[owner[part], free[part]] = around.float()

    def entries(self, feature: int, n: int | None = None) -> list[tuple[float, int, int, list[int], list[float]]]:
        """value, source, position, context ids and activations (-1 and 0 beyond the ends of the text)."""
        count = int((self.value[feature] > 0).sum())
        count = count if n is None else min(count, max(n, 0))
        slots = self._slot[feature, :count]
        columns = [x[feature, :count].tolist() for x in (self.value, self.source, self.position)]
        columns += [x[feature, slots].tolist() for x in (self._ids, self._around)]
        return list(zip(*columns, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Everything, with the contexts ids and around [d_sae, most, W] in the order of value."""
        where = self._slot[..., None].expand_as(self._ids)
        return {
            "value": self.value,
            "source": self.source,
            "position": self.position,
            "ids": self._ids.gather(1, where),
            "around": self._around.gather(1, where),
        }

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave. Raises KeyError or ValueError for tensors of another form."""
        for name, mine in self.tensors().items():
            if tensors[name].shape != mine.shape or tensors[name].dtype != mine.dtype:
                raise ValueError(f"{name} is {list(tensors[name].shape)}, expected {list(mine.shape)}")
        self.value, self.source, self.position = (tensors[name] for name in ("value", "source", "position"))
        self._ids, self._around = tensors["ids"], tensors["around"]
        self._slot = torch.arange(self.most).repeat(self.d_sae, 1)
