"""The rooms of the house: which package may import which, and how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
#: Packages and modules of `remind`; each imports only itself and what stands before it.
ORDER = (
    "core",
    "data",
    "states",
    "text",
    "models",
    "train_sae",
    "llm",
    "perception",
    "grounding",
    "reflect",
    "pipeline",
    "alignment",
    "evaluation",
    "memory",
    "refmem",
    "testbed",
    "viewing",
    "demo",
)
#: Entry points, which may import anything in `remind`.
ENTRIES = ("__init__", "__main__", "commands")
MAX_LINES = 400


def imported_modules(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", files("remind"), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_only_backwards_in_the_order(path: Path) -> None:
    room = path.relative_to(ROOT / "remind").parts[0].removesuffix(".py")
    allowed = ORDER if room in ENTRIES else ORDER[: ORDER.index(room) + 1]
    for module in imported_modules(path):
        top, *rest = module.split(".")
        assert top not in ("experiments", "benchmarks"), module
        if top == "remind" and rest and rest[0] not in ("read", "Corpus", "Dialogue"):
            assert rest[0] in allowed, f"{module} stands below {room}"


@pytest.mark.parametrize("path", files("sae"), ids=lambda path: str(path.relative_to(ROOT)))
def test_sae_stands_alone(path: Path) -> None:
    assert not {module.split(".")[0] for module in imported_modules(path)} & {"remind", "experiments", "benchmarks"}


@pytest.mark.parametrize("path", files("remind", "sae"), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
