"""`remind demo` replaces what an earlier demo left, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from remind.core.errors import ConfigError
from remind.demo import DemoConfig, demo


def test_what_is_no_demos_is_not_replaced(tmp_path: Path) -> None:
    for name in ("sae", "states"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("hours of work")
    with pytest.raises(ConfigError, match="holds states or SAEs that are not a demo's; choose another out"):
        demo(DemoConfig(out=str(tmp_path)))
    assert len(list(tmp_path.glob("*/mine"))) == 2
