"""A real OpenAI-compatible server with two tiny models, started once, and what the tests of the clients share."""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from fault_proxy import Server

from remind.llm.endpoints import EndpointConfig
from remind.llm.request import Message, Request, Stage

#: Seconds to wait for the server; a few on an idle machine.
START = 300


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the two tiny models."""
    from tiny_qwen3 import save_random, save_saying

    folder = tmp_path_factory.mktemp("models")
    return save_random(folder / "random"), save_saying(folder / "saying")


@pytest.fixture(scope="session")
def server(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """`transformers serve` on a free loopback port."""
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn", "openai")):
        pytest.skip("the extra serving is not installed: pip install 'remind-toolkit[serving]'")
    # the one of this Python, which need not be in PATH
    command = shutil.which("transformers", path=str(Path(sys.executable).parent)) or shutil.which("transformers")
    if command is None:
        pytest.fail("the extra serving is installed, but there is no command `transformers`")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with log.open("wb") as output:
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
                    pytest.fail(f"transformers serve did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
        random, saying = tiny_models
        yield Server(f"http://127.0.0.1:{port}/v1", str(random), str(saying))
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between tries."""
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.05)


@pytest.fixture
def endpoint() -> Callable[..., EndpointConfig]:
    """An endpoint for a test server: `endpoint(url, retries=2)`."""

    def make(url: str, model: str = "m", **fields: object) -> EndpointConfig:
        return EndpointConfig(model, url, **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def ask() -> Callable[..., Request]:
    """A request with one message: `ask("hello", max_tokens=8)`."""

    def make(text: str, stage: Stage = "judge", **fields: object) -> Request:
        return Request((Message("user", text),), stage, **fields)  # type: ignore[arg-type]

    return make
