"""Every number in every config: what is no number, or out of range, is refused before any work starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from importlib import import_module
from itertools import chain
from math import nan
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from remind.build.config import BuildStatesConfig
from remind.commands import COMMANDS, main
from remind.core.errors import ConfigError
from remind.llm.endpoints import LLMConfig
from sae import ConfigError as SAEConfigError
from sae.ranges import FiniteFloat, PositiveInt, Share, check_ranges

ROOT = Path(__file__).parents[2]
#: What a config cannot be made without.
NEEDED: dict[str, dict[str, Any]] = {
    "ChainConfig": {"build": BuildStatesConfig("x", "x")},
    "Edge": {"student": 1, "teacher": 2},
    "ExportOfficialConfig": {"benchmark": "locomo"},
    "InspectConfig": {"question": "x"},
    "MemoryExperimentConfig": {"item": "reranker"},
    "MemoryKeysConfig": {"data": ["x"]},
    "PublishedConfig": {"data": ["x"]},
    "PlotRunConfig": {"run": ["x"]},
    "PretrainConfig": {"single": 0},
}


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
    return sorted(found, key=lambda kind: kind.__name__)


def with_number(hint: Any, number: float) -> Iterator[Any]:
    """Values of a type in which the number stands wherever one may."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in (int, float):
        yield number
    elif origin is Annotated:
        yield from with_number(args[0], number)
    elif origin is tuple and args[-1] is not ...:
        yield from zip(*(with_number(arm, number) for arm in args), strict=True)
    else:
        inner = chain.from_iterable(with_number(arm, number) for arm in args)
        yield from ((value,) if origin is tuple else [value] if origin is list else value for value in inner)


def make(kind: type, **values: Any) -> None:
    """A config of this class, as a command would have it."""
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    config = kind(**dict.fromkeys(needed, "x") | NEEDED.get(kind.__name__, {}) | values)
    if kind.__name__ == "EndpointConfig":
        LLMConfig(default=config)


@pytest.mark.parametrize("kind", config_classes(), ids=lambda kind: kind.__name__)
def test_nothing_takes_what_is_no_number(kind: type) -> None:
    make(kind)
    for field, hint in get_type_hints(kind, include_extras=True).items():
        for value in with_number(hint, nan):
            with pytest.raises((ConfigError, SAEConfigError), match=rf"\.{field} must be |^edge 0 -> 0|^edges: "):
                make(kind, **{field: value})


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
        (Mixed(share="a"), "Mixed.share must be a number, not 'a'"),  # type: ignore[arg-type]
        (Mixed(kind="z"), "Mixed.kind must be one of x, y or a number, not 'z'"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as refused:
            check_ranges(bad, ConfigError)
        assert str(refused.value) == message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("train-sae --out x --trainer.betas [2,3]", "trainer.betas.0: Input should be less than 1, not 2.0"),
        ("train-sae --out x --trainer.k 9 --trainer.d_sae 4", "trainer: k = 9 exceeds d_sae = 4"),
        ("train-pra --states x --out x --lora.r -1", "lora.r: Input should be greater than or equal to 1, not -1"),
        ("build-states --input x --out x --grounding.fuse.sigma .nan", "grounding.fuse.sigma: Input should be "),
    ],
)
def test_a_command_refuses_in_one_line(line: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {words}")
    assert error.count("\n") == 1
