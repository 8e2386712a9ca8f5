"""Types of numbers in config dataclasses, with their ranges, which pydantic reads, too. Needs neither it nor torch."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import is_dataclass
from numbers import Integral, Real
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from annotated_types import Interval as Range

#: Bound of what has no other: far above any real setting, and exact as a 64-bit integer and as a float.
LIMIT = 10**15
PositiveInt = Annotated[int, Range(ge=1, le=LIMIT)]
NonNegativeInt = Annotated[int, Range(ge=0, le=LIMIT)]
#: numpy and scikit-learn take seeds below 2**32; this leaves room for offsets.
Seed = Annotated[int, Range(ge=0, le=2**31 - 1)]
#: Processes; each has models of its own.
Workers = Annotated[int, Range(ge=0, le=1024)]
#: Of a bootstrap: more would take hours, and change no digit that is shown.
Resamples = Annotated[int, Range(ge=1, le=10**6)]
PositiveFloat = Annotated[float, Range(gt=0, le=LIMIT)]
NonNegativeFloat = Annotated[float, Range(ge=0, le=LIMIT)]
FiniteFloat = Annotated[float, Range(ge=-LIMIT, le=LIMIT)]
Share = Annotated[float, Range(ge=0, le=1)]
PositiveShare = Annotated[float, Range(gt=0, le=1)]
ShareBelowOne = Annotated[float, Range(ge=0, lt=1)]
_BOUNDS = (
    ("gt", "above", operator.gt),
    ("ge", "at least", operator.ge),
    ("lt", "below", operator.lt),
    ("le", "at most", operator.le),
)


def check_ranges(config: Any, error: type[Exception], kind: type | None = None) -> None:
    """Raise `error` for the first number of a dataclass outside of its range, NaN included, or word that is no choice;
    of the dataclasses in its fields, too.

    For values given in Python; on the command line pydantic checks all types.

    Args:
        kind: the class whose fields are looked at; None: that of `config`.
    """
    for name, hint in get_type_hints(kind or type(config), include_extras=True).items():
        parts = [*_parts(hint)]
        for value in _values(getattr(config, name)):
            if is_dataclass(value):
                check_ranges(value, error)
            if value is None or (isinstance(value, str) and str in parts):
                continue
            limited = [part for part in parts if isinstance(part, Range) or get_origin(part) is Literal]
            allowed = [_allowed(part, value, int in parts) for part in limited]
            if allowed and all(allowed):
                raise error(f"{type(config).__name__}.{name} must be {' or '.join(allowed)}, not {value!r}")


def _parts(hint: Any) -> Iterator[Any]:
    """A type, and all that it is made of: the arms of a union, the items of a list, the range of a number."""
    yield hint
    for part in get_args(hint):
        yield from _parts(part)


def _values(given: Any) -> Iterator[Any]:
    if isinstance(given, list | tuple):
        for item in given:
            yield from _values(item)
    else:
        yield given


def _allowed(part: Any, value: Any, whole: bool) -> str:
    """What a range or choice allows, if that is not the value."""
    if not isinstance(part, Range):
        return "" if value in get_args(part) else f"one of {', '.join(map(str, get_args(part)))}"
    if not isinstance(value, Integral if whole else Real):
        return "an integer" if whole else "a number"
    limits = [(word, limit, holds) for name, word, holds in _BOUNDS if (limit := getattr(part, name)) is not None]
    fits = all(holds(value, limit) for _, limit, holds in limits)
    return "" if fits else " and ".join(f"{word} {limit}" for word, limit, _ in limits)
