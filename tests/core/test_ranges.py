"""Every number in every config has a range, and what is outside of it is refused before any work starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from math import nan
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import pytest

from remind.commands import COMMANDS
from remind.core.errors import ConfigError
from sae.ranges import FiniteFloat, PositiveInt, Range, Share, check_ranges

ROOT = Path(__file__).parents[2]


def config_classes() -> list[type]:
    """The config classes of all commands and experiments, and those in them."""
    roots = [command.config_type() for command in COMMANDS.values()]
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        for name in re.findall(r"^    main\(\s*(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE):
            roots.append(getattr(import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)), name))
    found: dict[type, None] = {}
    waiting: list[Any] = roots
    while waiting:
        hint = waiting.pop()
        if is_dataclass(hint) and isinstance(hint, type) and hint not in found:
            found[hint] = None
            waiting += get_type_hints(hint).values()
        waiting += get_args(hint)
    return list(found)


def unlimited(hint: Any) -> Iterator[type]:
    """The numbers in a type that have no range."""
    if hint in (int, float):
        yield hint
    elif not any(isinstance(part, Range) for part in get_args(hint)):
        for part in get_args(hint):
            yield from unlimited(part)


def test_every_number_has_a_range() -> None:
    kinds = config_classes()
    assert len(kinds) > 40
    hints = {f"{kind.__name__}.{name}": hint for kind in kinds for name, hint in _hints(kind).items()}
    # edges as they are written, of which the objective makes `Edge`s
    assert [name for name, hint in hints.items() if any(unlimited(hint))] == ["Objective.edges"]


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


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
        (Mixed(share=nan), "Mixed.share must be at least 0 and at most 1, not nan"),
        (Mixed(pairs=((0.5, 1), (2, 3))), "Mixed.pairs must be at least 0 and at most 1, not 2"),
        (Mixed(layers=[1.5]), "Mixed.layers must be an integer, not 1.5"),  # type: ignore[list-item]
        (Mixed(share="a"), "Mixed.share must be a number, not 'a'"),  # type: ignore[arg-type]
        (Mixed(kind="z"), "Mixed.kind must be one of x, y or a number, not 'z'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as refused:
            check_ranges(bad, ConfigError)
        assert str(refused.value) == message
