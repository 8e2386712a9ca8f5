"""The tokens with the largest activations of every feature, and their contexts, in tensors of fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from sae.errors import ConfigError, ShapeError
from sae.topk import SparseCodes

#: Contexts looked up at a time.
_CHUNK = 1 << 15


class Tokens:
    """The tokens of whole texts, one after the other: ids [N], the length of each text, and codes [N, k].

    On tokens that do not count all values are 0. Raises ShapeError for a feature beyond d_sae.
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
        place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
        active = inside & (keys[place] == wanted)
        return torch.where(inside, self.ids[window], -1), torch.where(active, values[place], 0)


class Ranking:
    """For each feature the `most` texts with the largest activations, by falling value; the earliest of equals first.

    Attributes:
        tensors: [d_sae, most] `value` (0: none yet), `source` (number of the text, -1: none yet) and `position` of the
            token in its text; [d_sae, most, W] `ids` and `around`, activations of the context (-1 and 0 beyond it).
    """

    def __init__(self, d_sae: int, most: int, context: tuple[int, int]) -> None:
        if d_sae < 1 or most < 1 or min(context) < 0:
            raise ConfigError(f"d_sae {d_sae}, per_feature {most}: must be at least 1; context {context}: at least 0")
        self.d_sae, self.most, self.context = d_sae, most, context
        width = sum(context) + 1
        self.tensors = {
            "value": torch.zeros(d_sae, most, dtype=torch.float64),
            "source": torch.full((d_sae, most), -1),
            "position": torch.zeros(d_sae, most, dtype=torch.int64),
            "ids": torch.full((d_sae, most, width), -1, dtype=torch.int32),
            "around": torch.zeros(d_sae, most, width),
        }

    def add(self, tokens: Tokens, first: int, ranks: Tensor | None = None) -> None:
        """Rank tokens of texts that are numbered from `first`.

        Args:
            ranks: [N, k], above 0, what active tokens are ranked by in place of their activations.
        """
        # only values larger than the last of a full list can enter it: equal values came earlier
        indices, values = tokens.codes.indices, (tokens.codes.values if ranks is None else ranks).double()
        take = tokens.codes.active() & (values > self.tensors["value"][:, -1][indices])
        if not bool(take.any()):
            return
        feature, value = indices[take], values[take]
        token = torch.arange(len(tokens.ids))[:, None].expand_as(take)[take]
        # every sort is stable: within any group, by falling value, and among equals by order of arrival
        value, order = value.sort(descending=True, stable=True)
        feature, token = feature[order], token[order]
        # the largest of each feature and text
        pair, order = (feature * len(tokens.starts) + tokens.text[token]).sort(stable=True)
        new = torch.ones_like(pair, dtype=torch.bool)
        new[1:] = pair[1:] != pair[:-1]
        largest = order[new].sort().values
        feature, order = feature[largest].sort(stable=True)
        value, token = value[largest][order], token[largest][order]
        rows, group, count = feature.unique_consecutive(return_inverse=True, return_counts=True)
        rank = torch.arange(len(feature)) - (count.cumsum(0) - count)[group]
        near = rank < self.most
        candidates = value.new_zeros(len(rows), self.most)
        candidates[group[near], rank[near]] = value[near]
        owners = torch.zeros(len(rows), self.most, dtype=torch.int64)
        owners[group[near], rank[near]] = token[near]
        # present entries come before candidates, so that they win ties
        both = torch.cat([self.tensors["value"][rows], candidates], 1)
        value, order = (x[:, : self.most] for x in both.sort(dim=1, descending=True, stable=True))
        new = order >= self.most
        row = torch.arange(len(rows))[:, None].expand_as(order)[new]
        token = owners[row, order[new] - self.most]
        text = tokens.text[token]
        chunks = zip(token.split(_CHUNK), rows[row].split(_CHUNK), strict=True)
        contexts = [tokens.around(*chunk, self.context) for chunk in chunks]
        ids, around = (torch.cat(parts) for parts in zip(*contexts, strict=True))
        update = {
            "value": value[new],
            "source": text + first,
            "position": token - tokens.starts[text],
            "ids": ids.int(),
            "around": around.float(),
        }
        kept = order.clamp(max=self.most - 1)
        for name, tensor in self.tensors.items():
            merged = tensor[rows[:, None], kept]
            merged[new] = update[name]
            tensor[rows] = merged

    def entries(self, feature: int, n: int | None = None) -> list[tuple[float, int, int, list[int], list[float]]]:
        """value, source, position, context ids and activations (-1 and 0 beyond the ends of the text)."""
        count = int((self.tensors["value"][feature] > 0).sum())
        count = count if n is None else min(count, max(n, 0))
        return list(zip(*(tensor[feature, :count].tolist() for tensor in self.tensors.values()), strict=True))
