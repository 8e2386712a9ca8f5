from __future__ import annotations

import pytest
from scripted import minilm

from remind.models.encoder import SentenceEncoder


@pytest.fixture(scope="session")
def encoder() -> SentenceEncoder:
    return minilm()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between tries, and for a request that is under way."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.02)
    monkeypatch.setattr("remind.llm.client._LONGEST_WAIT", 0.02)
