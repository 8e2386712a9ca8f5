"""Shared fixtures. Real data is read where REMIND_DATA points; tests that need it skip without it and say so."""

from __future__ import annotations

import gc
import os
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import settings

gc.disable()
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("REMIND_QUIET", "1")

# the first call of a torch kernel, or a busy machine, takes longer than hypothesis allows one example
settings.register_profile("remind", deadline=None)
settings.load_profile("remind")

_connect = sqlite3.connect


def hasty(*args: Any, **kwargs: Any) -> sqlite3.Connection:
    """A database that does not wait for the disk."""
    database = _connect(*args, **kwargs)
    database.execute("PRAGMA synchronous = OFF")
    return database


# files of tests need not outlive a power cut, and a disk takes 5 to 50 ms to promise that each of them does
sqlite3.connect = hasty
os.fsync = lambda _: None  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that no worker is left alone with one at the end (--no-loadscope-reorder)."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """Garbage collection leaves alone what was imported, which would take a third of the time of all tests."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Weights that a test draws do not depend on the tests before it."""
    torch.manual_seed(0)


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with little room."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("file systems can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def chromium() -> str | None:
    """An installed Chromium or Chrome."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


# no longer than a file: while it is open its event loop runs, and others cannot start theirs
@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless browser; tests that need it skip where there is none."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
    path = chromium()
    if path is None:
        pytest.skip("no Chromium here: install Debian's chromium, or name one in CHROMIUM")
    with sync_api.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """Opens a page from disk without a network, in a context of its own or a given one, with what its console says."""
    contexts = []

    def opened(path: Path, context: Any = None) -> SimpleNamespace:
        if context is None:
            contexts.append(browser.new_context(viewport={"width": 1280, "height": 860}, offline=True))
        one = SimpleNamespace(page=(context or contexts[-1]).new_page(), said=[])
        one.page.set_default_timeout(60_000)
        one.page.on("console", lambda message: one.said.append(f"{message.type}: {message.text}"))
        one.page.on("pageerror", lambda error: one.said.append(f"error: {error}"))
        one.page.goto(path.as_uri())
        # not wait_for_function: it asks again by eval, which the page's policy forbids
        one.page.wait_for_selector("html[data-ready=true]")
        return one

    yield opened
    for context in contexts:
        context.close()
