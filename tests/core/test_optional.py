"""What needs a package that not everyone has says which extra brings it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

from remind.core import EXTRAS, optional
from remind.core.errors import ModelError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("package", EXTRAS)
def test_a_missing_package_is_named_with_its_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModelError, match=rf"^train-x needs .*{package}.*'remind-toolkit\[{EXTRAS[package]}\]'"):
        optional(f"{package}.inner", "train-x")


def test_extras_hold_the_packages_and_nothing_else_imports_them() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        package = {"mem0": "mem0ai"}.get(module, module.replace("_", "-"))
        assert any(re.match(f"{package}[>=]=", line) for line in extras[extra])
    listed = {re.split("[>=]=", line)[0].replace("-", "_") for lines in extras.values() for line in lines}
    optional = {*listed, *EXTRAS} - {"transformers"}
    for file in [*(ROOT / "remind").rglob("*.py"), *(ROOT / "sae").rglob("*.py")]:
        names: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.split(".")[0])
        assert not names & optional, file
