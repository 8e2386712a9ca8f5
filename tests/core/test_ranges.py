"""A number outside of its range is refused before any work starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from remind.core.errors import ConfigError
from sae.ranges import FiniteFloat, PositiveInt, Share, check_ranges


@dataclass
class Mixed:
    """Of each kind one."""

    share: Share | None = None
    pairs: tuple[tuple[Share, float], ...] = ()
    layers: list[PositiveInt | str] | None = None
    kind: Literal["x", "y"] | FiniteFloat = "x"


def test_a_refusal_names_the_field_and_the_value() -> None:
    for good in (Mixed(1, ((0.5, 1), (0, 0.3))), Mixed(layers=[1, "a"]), Mixed(kind=3)):
        check_ranges(good, ConfigError)
    for bad, message in (
        (Mixed(share=1.5), "Mixed.share must be at least 0 and at most 1, not 1.5"),
        (Mixed(pairs=((0.5, 1), (2, 3))), "Mixed.pairs must be at least 0 and at most 1, not 2"),
        (Mixed(layers=[1.5]), "Mixed.layers must be an integer, not 1.5"),  # type: ignore[list-item]
        (Mixed(kind="z"), "Mixed.kind must be one of x, y or a number, not 'z'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as refused:
            check_ranges(bad, ConfigError)
        assert str(refused.value) == message
