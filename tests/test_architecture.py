"""The rooms of the house: which package may import which, and how long a file may be."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

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
    "build",
    "alignment",
    "train_pra",
    "evaluation",
    "check_states",
    "ask",
    "memory",
    "refmem",
    "testbed",
    "memory_training",
    "viewing",
    "demo",
)
#: Entry points, which may import anything in `remind`.
ENTRIES = ("__init__", "__main__", "commands")
MAX_LINES = 700


def imported_modules(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, at the top or inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (ROOT / package).rglob("*.py"))


def test_imports_go_only_backwards_in_the_order() -> None:
    wrong = []
    for path in files("remind"):
        room = path.relative_to(ROOT / "remind").parts[0].removesuffix(".py")
        allowed = ORDER if room in ENTRIES else ORDER[: ORDER.index(room) + 1]
        for module in imported_modules(path):
            top, *rest = module.split(".")
            forward = top == "remind" and rest and rest[0] in ORDER and rest[0] not in allowed
            if top in ("experiments", "benchmarks") or forward:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong


def test_sae_stands_alone() -> None:
    foreign = {"remind", "experiments", "benchmarks"}
    assert not [path for path in files("sae") if {name.split(".")[0] for name in imported_modules(path)} & foreign]


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files("remind", "sae")}
    assert not {str(path): length for path, length in lengths.items() if length > MAX_LINES}
