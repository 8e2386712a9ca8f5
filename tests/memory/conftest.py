from __future__ import annotations

import pytest
from scripted import minilm

from remind.models.encoder import SentenceEncoder


@pytest.fixture(scope="session")
def encoder() -> SentenceEncoder:
    return minilm()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between tries."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)
