"""What needs a package that not everyone has says which extra brings it."""

from __future__ import annotations

import sys
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
