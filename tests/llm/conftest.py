"""A real OpenAI-compatible server with two tiny models, and short waits between tries."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

import pytest

#: Seconds to wait for the server; a few on an idle machine.
START = 300


class Server(NamedTuple):
    """A running `transformers serve`: its base URL and the names of the models of tiny_qwen3."""

    url: str
    random: str
    saying: str


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`transformers serve` on a free loopback port."""
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")):
        pytest.skip("the extra serving is not installed: pip install 'remind-toolkit[serving]'")
    # the one of this Python, which need not be in PATH
    command = shutil.which("transformers", path=str(Path(sys.executable).parent)) or shutil.which("transformers")
    if command is None:
        pytest.fail("the extra serving is installed, but there is no command `transformers`")
    from tiny_qwen3 import save_random, save_saying

    folder = tmp_path_factory.mktemp("serve")
    random, saying = save_random(folder / "random"), save_saying(folder / "saying")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with (folder / "log.txt").open("wb") as output:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen([command, "serve", *arguments], stdout=output, stderr=output, env=environment)
    try:
        patience = time.monotonic() + START
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except OSError:
                if process.poll() is not None or time.monotonic() > patience:
                    pytest.fail(f"transformers serve did not start:\n{(folder / 'log.txt').read_text()[-3000:]}")
                time.sleep(0.2)
        yield Server(f"http://127.0.0.1:{port}/v1", str(random), str(saying))
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)
