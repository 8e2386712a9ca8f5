"""The content-hash cache: round trips, keys, damage, and disks that cannot be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from remind.core.files import Cache, write_json


def test_tensors_and_json_come_back_as_they_were_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    tensors = {"a": torch.randn(3, 4).t(), "b": torch.arange(5), "empty": torch.empty(0, 2)}
    assert cache.read("codes", {"x": 1}) is None
    cache.write("codes", {"x": 1, "y": [2]}, tensors, {"é": [1, None]})
    entry = cache.read("codes", {"y": [2], "x": 1})
    assert entry is not None
    assert entry[1] == {"é": [1, None]}
    assert all(torch.equal(entry[0][name], value) for name, value in tensors.items())
    assert cache.read("codes", {"x": 1, "y": [3]}) is None
    assert cache.read("targets", {"x": 1, "y": [2]}) is None


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: Cache(folder).write("codes", 1, {"a": torch.arange(100_000)}),
        lambda folder: write_json(folder / "a.json", "x" * 500_000),
    ],
)
def test_a_full_disk_is_an_error_that_scripts_show_in_a_line_and_leaves_nothing(
    small_disk: Path, write: Callable[[Path], None]
) -> None:
    with pytest.raises(OSError, match=f"No space left on device.*{small_disk}"):
        write(small_disk)
    assert not [path for path in small_disk.rglob("*") if path.is_file() or path.name.endswith(".tmp")]
