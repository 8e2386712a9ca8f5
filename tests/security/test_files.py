"""Rights of what is written: those the umask gives, no more and no less, for single files and whole folders."""

from __future__ import annotations

import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from remind.core.files import atomic_folder, write_json, write_rows
from sae import TopKSAE


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def mask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_rights_are_those_of_the_umask(mask: int, tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "folder") as folder:
        (folder / "plain.txt").write_text("x")
        write_json(folder / "a.json", {})
    write_rows(tmp_path / "rows.jsonl", [1])
    TopKSAE(4, 8, 2, generator=torch.Generator().manual_seed(0)).save(tmp_path / "sae")
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert len(modes) >= 6
    for path, mode in modes.items():
        assert mode == (0o777 if path.is_dir() else 0o666) & ~mask, path


def test_the_cache_of_replies_is_no_more_open_than_the_umask(mask: int, tmp_path: Path) -> None:
    from remind.llm.cache import ReplyCache

    cache = ReplyCache(tmp_path / "below" / "replies.sqlite")
    with cache.claim("k"), closing(sqlite3.connect(cache.path)) as db:
        db.execute("INSERT INTO replies VALUES ('k', '', '', '', 1, 1, 0, 0, 0.0, 0.0)")
        # with the journal beside it, which holds the same text, and the lock
        paths = list(tmp_path.rglob("*"))
        assert {"replies.sqlite", "replies.sqlite-journal", "replies.sqlite.k.lock"} <= {path.name for path in paths}
        assert [path for path in paths if path.stat().st_mode & mask] == []
