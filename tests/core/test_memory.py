"""The sums of a plan of memory, and what is refused, against sums by hand."""

from __future__ import annotations

import pytest
import torch

from remind.core import memory
from remind.core.errors import ConfigError
from remind.core.memory import MemoryPlan

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
PARTS = {"weights": 4_000_000_000, "head": 2_000_000_000, "block": 1_000_000_000, "buffer": 3_000_000_000}
PLAN = MemoryPlan(PARTS, "a smaller model", either=("head", "block"), on_host=("buffer",))


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes of memory by type of device."""
    sizes = {"cpu": 20_000_000_000, "cuda": 6_000_000_000}
    monkeypatch.setattr(memory, "capacity", lambda device: sizes[device.type])
    return sizes


def test_what_does_not_fit_is_refused(
    there: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PLAN.total() == 9_000_000_000
    PLAN.check(GPU)
    said = "estimated memory: cuda:1: weights 4.0 + head 2.0 or block 1.0: 6.0 of 6.0 GB; "
    assert capsys.readouterr().err == said + "main memory: buffer 3.0: 3.0 of 20.0 GB\n"
    there["cuda"] -= 1
    with pytest.raises(ConfigError, match=r"there is \(cuda:1: .*: 6\.0 of 6\.0 GB\); a smaller model would help$"):
        PLAN.check(GPU, say=False)
    # every process of a launch has its own
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    PLAN.check(CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"for each of 3 processes: 27\.0 of 20\.0 GB"):
        PLAN.check(CPU)
