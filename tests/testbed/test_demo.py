"""`remind demo` replaces what an earlier demo left, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from remind.core.errors import ConfigError
from remind.demo import DemoConfig, demo


def test_what_is_no_demos_is_not_replaced(tmp_path: Path) -> None:
    for name in ("sae", "run-pra"):
        mine = tmp_path / name / name / "mine"
        mine.parent.mkdir(parents=True)
        mine.write_text("hours of work")
        with pytest.raises(ConfigError, match=rf"{name}/{name} is not a demo's, and would be replaced"):
            demo(DemoConfig(out=str(tmp_path / name)))
        assert mine.exists()
