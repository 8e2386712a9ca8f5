"""Shared fixtures. Real data is read where REMIND_DATA points; tests that need it skip without it and say so."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("REMIND_QUIET", "1")

# the first call of a torch kernel, or a busy machine, takes longer than hypothesis allows one example
settings.register_profile("remind", deadline=None)
settings.load_profile("remind")


@pytest.fixture(scope="session")
def remind_data() -> Path:
    """The folder of real data."""
    folder = os.environ.get("REMIND_DATA")
    if not folder:
        pytest.skip("REMIND_DATA is not set: this test reads real data")
    path = Path(folder).resolve()
    if not path.is_dir():
        pytest.fail(f"REMIND_DATA={folder} is not a folder")
    return path
