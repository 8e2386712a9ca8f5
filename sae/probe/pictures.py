"""The pictures on which each feature fires most, and on which of their patches."""

from __future__ import annotations

from bisect import insort
from typing import NamedTuple

import torch

from sae.errors import ConfigError, ShapeError
from sae.topk import SparseCodes


class PictureExample(NamedTuple):
    """A picture that a feature fires on.

    Attributes:
        value: largest activation on it. source: its name.
        values: rows x columns, activation on each patch that is a token, row by row. columns: patches in a row.
    """

    value: float
    source: str
    values: tuple[float, ...]
    columns: int


class TopPictures:
    """The `per_feature` pictures with the largest activations of each feature of one coder.

    A picture that comes several times counts once for a feature, where it fires most; among equals the earliest wins.

    Attributes:
        fired: [d_sae] int64, tokens of pictures each feature was active on.
        n_pictures, n_tokens: pictures added, and their tokens.
    """

    def __init__(self, d_sae: int, per_feature: int = 10) -> None:
        self.d_sae, self.per_feature = d_sae, per_feature
        self.n_pictures = self.n_tokens = 0
        self.fired = torch.zeros(d_sae, dtype=torch.int64)
        # what a picture must exceed to enter a full list
        self._least = torch.zeros(d_sae, dtype=torch.float64)
        self._best: dict[int, list[PictureExample]] = {}

    def add(self, source: str, codes: SparseCodes, columns: int) -> None:
        """Add a picture.

        Args:
            codes: [rows x columns, k], on its tokens row by row.

        Raises ShapeError for codes that are no whole rows, or a feature beyond d_sae.
        """
        values, indices, active = codes.values.double(), codes.indices, codes.active()
        if len(values) % columns or (indices.numel() and int(indices.max()) >= self.d_sae):
            raise ShapeError(f"{len(values)} tokens, {columns} in a row, of a coder of {self.d_sae} features or fewer")
        self.n_pictures += 1
        self.n_tokens += len(values)
        self.fired += torch.bincount(indices[active], minlength=self.d_sae)
        largest = torch.zeros(self.d_sae, dtype=torch.float64)
        largest.scatter_reduce_(0, indices[active], values[active], "amax")
        for feature in (largest > self._least).nonzero().flatten().tolist():
            best = self._best.setdefault(feature, [])
            value = float(largest[feature])
            earlier = next((one for one in best if one.source == source), None)
            if earlier is not None:
                if value <= earlier.value:
                    continue
                best.remove(earlier)
            on_patches = (values * (indices == feature)).sum(-1).tolist()
            insort(best, PictureExample(value, source, tuple(on_patches), columns), key=lambda one: -one.value)
            del best[self.per_feature :]
            if len(best) == self.per_feature:
                self._least[feature] = best[-1].value

    def features(self) -> list[int]:
        """Those that fire on a picture, ascending."""
        return sorted(self._best)

    def examples(self, feature: int, n: int | None = None) -> list[PictureExample]:
        """Pictures by falling value, at most n. Raises ConfigError for a feature that does not exist."""
        if not 0 <= feature < self.d_sae:
            raise ConfigError(f"feature {feature} does not exist; the coder has 0 to {self.d_sae - 1}")
        return self._best.get(feature, [])[:n]
