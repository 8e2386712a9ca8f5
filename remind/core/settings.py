"""A base of settings."""

from __future__ import annotations

from remind.core.errors import ConfigError
from sae.ranges import check_ranges


class Checked:
    """Settings whose numbers are held against their ranges. Not of an optional group: the parser takes one with a base
    for a class that has others in its place.

    Raises:
        ConfigError: a number out of its range.
    """

    def __post_init__(self) -> None:
        check_ranges(self, ConfigError)
