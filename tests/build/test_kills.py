"""Killed anywhere, no room, an input that vanishes: one clear line, nothing half-written or lost."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from forked import Forked
from small_corpus import contents

from remind.core.errors import DataError
from remind.states.dataset import load_states


def written(*folders: Path) -> int:
    files = (path for folder in folders for path in folder.rglob("*"))
    return sum(1 for path in files if path.is_file() and not path.name.startswith("."))


@pytest.mark.slow
def test_a_build_that_is_killed_anywhere_ends_with_the_same_states(
    corpus: Path, tmp_path: Path, start: Callable[..., Forked]
) -> None:
    """One and two workers in turns: each goes on with what the other has left."""
    whole = tmp_path / "whole"
    process = start(corpus, whole, tmp_path / "whole-cache")
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    files = written(tmp_path / "whole-cache", whole)
    draw = random.Random(1)
    out, cache = tmp_path / "out", tmp_path / "cache"
    for kill in range(int(os.environ.get("REMIND_KILLS", "2"))):
        process = start(corpus, out, cache, "--workers", "12"[kill % 2])
        enough = draw.randint(min(written(cache, out) + 1, files), files)
        while process.returncode is None and written(cache, out) < enough:
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        process.kill()
        process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
        if (out / "README.md").exists():
            # whole or not there
            assert contents(out).keys() >= contents(whole).keys()
            shutil.rmtree(out)
        elif out.exists():
            with pytest.raises(DataError, match="not built to its end"):
                load_states(out)
    process = start(corpus, out, cache)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert contents(out) == contents(whole)
