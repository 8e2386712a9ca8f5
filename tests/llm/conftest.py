from __future__ import annotations

import pytest


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between tries."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)
