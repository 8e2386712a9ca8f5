"""What the fields of a config dataclass accept, declared with their types and checked in one place. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from functools import cache
from math import inf
from numbers import Integral, Real
from os import PathLike
from reprlib import repr as shortened
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

#: Bound of what has no other: far above any real setting, and exact as a 64-bit integer and as a float.
LIMIT = 10**15


@dataclass(frozen=True, kw_only=True)
class Range:
    """Metadata of an annotated int or float: greater than (or equal to), less than (or equal to); never NaN."""

    gt: float = -inf
    ge: float = -inf
    lt: float = inf
    le: float = LIMIT

    def __contains__(self, value: Any) -> bool:
        return bool(self.gt < value < self.lt and self.ge <= value <= self.le)

    def __str__(self) -> str:
        bounds = (("above", self.gt), ("at least", self.ge), ("below", self.lt), ("at most", self.le))
        return " and ".join(f"{word} {bound:.10g}" for word, bound in bounds if abs(bound) < inf)


PositiveInt = Annotated[int, Range(ge=1)]
NonNegativeInt = Annotated[int, Range(ge=0)]
#: numpy and scikit-learn take seeds below 2**32; this leaves room for offsets.
Seed = Annotated[int, Range(ge=0, le=2**31 - 1)]
#: Processes; each has models of its own.
Workers = Annotated[int, Range(ge=0, le=1024)]
PositiveFloat = Annotated[float, Range(gt=0)]
NonNegativeFloat = Annotated[float, Range(ge=0)]
FiniteFloat = Annotated[float, Range(ge=-LIMIT)]
Share = Annotated[float, Range(ge=0, le=1)]
PositiveShare = Annotated[float, Range(gt=0, le=1)]
ShareBelowOne = Annotated[float, Range(ge=0, lt=1, le=inf)]

#: What values of a plain type are instances of, and what they are called.
_KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "an integer"),
    float: (Real, "a number"),
    str: ((str, PathLike), "text"),
    NoneType: (NoneType, "none"),
}


def check_ranges(config: Any, error: type[Exception], kind: type | None = None) -> None:
    """Raise `error` for the first field of a dataclass, or of one in it, that holds what its annotation does not allow.

    Args:
        kind: the class whose fields are looked at; None: that of `config`.

    Looked at are plain values, `Literal`, numbers `Annotated` with a `Range`, and lists, tuples and unions of those.
    """
    if problem := _problem(config, kind or type(config), type(config).__name__):
        raise error(problem)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _problem(value: Any, hint: Any, name: str) -> str | None:
    """One line on a value that is not allowed; None: it is."""
    origin, args = get_origin(hint), get_args(hint)
    allowed = ""
    if is_dataclass(hint):
        if isinstance(value, hint):  # type: ignore[arg-type]
            own = _hints(hint).items()  # type: ignore[arg-type]
            return _first(_problem(getattr(value, field), kind, f"{name}.{field}") for field, kind in own)
        allowed = f"of type {hint.__name__}"  # type: ignore[union-attr]
    elif origin is Annotated:
        if problem := _problem(value, args[0], name):
            return problem
        allowed = next((str(bounds) for bounds in args[1:] if isinstance(bounds, Range) and value not in bounds), "")
    elif origin in (Union, UnionType):
        problems = [_problem(value, arm, name) for arm in args]
        return None if None in problems else problems[0]
    elif origin in (list, tuple) and not isinstance(value, list | tuple):
        allowed = "a list"
    elif origin in (list, tuple):
        kinds = args if origin is tuple and args[-1] is not ... else args[:1] * len(value)
        if len(kinds) == len(value):
            return _first(_problem(*pair, f"{name}[{n}]") for n, pair in enumerate(zip(value, kinds, strict=True)))
        allowed = f"{len(kinds)} values"
    elif origin is Literal and value not in args:
        allowed = f"one of {', '.join(map(str, args))}"
    elif hint in _KINDS:
        kind, noun = _KINDS[hint]
        allowed = "" if isinstance(value, kind) and (hint is bool or not isinstance(value, bool)) else noun
    return f"{name} must be {allowed}, not {shortened(value)}" if allowed else None


def _first(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)
