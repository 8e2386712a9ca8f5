"""The client against a real server: `transformers serve` with a tiny Qwen3 model of random weights, over HTTP."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch
from chat_samples import ask, chat

from remind.llm.endpoints import LOCAL, EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.local import LocalChat
from remind.models.nano import VOCAB_SIZE, nano_tokenizer

pytestmark = pytest.mark.slow

#: Seconds to wait for the server; a few on an idle machine.
START = 300


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a text-only model whose replies differ from prompt to prompt and mean nothing."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = nano_tokenizer()
    ids = dict(zip(("eos_token_id", "pad_token_id"), [tokenizer.eos_token_id, tokenizer.pad_token_id], strict=True))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=VOCAB_SIZE, bos_token_id=None, **sizes, **heads, **ids))
    model.generation_config.update(**ids)
    # random weights of the usual size make every prompt's reply nearly the same
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.mul_(8)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of `transformers serve` on a free loopback port."""
    if any(importlib.util.find_spec(name) is None for name in ("fastapi", "uvicorn")):
        pytest.skip("the extra serving is not installed: pip install 'remind-toolkit[serving]'")
    # the one of this Python, which need not be in PATH
    command = shutil.which("transformers", path=str(Path(sys.executable).parent)) or shutil.which("transformers")
    assert command is not None, "the extra serving is installed, but there is no command `transformers`"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    words = [command, "serve", "--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "float32"]
    with log.open("wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, "HF_HUB_OFFLINE": "1"})
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
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


def plain(text: str) -> str:
    """Without special tokens, which the server tells and we do not, and without the space around, which it strips."""
    return re.sub(r"<\|\w+\|>", "", text).strip()


def test_the_server_and_the_model_in_this_process_say_the_same(url: str, model: str) -> None:
    requests = [ask(f"Where did {name} go?", max_tokens=6) for name in ("Ann", "Ben", "Cleo", "the dog")]
    ledger = Ledger()
    there = chat(url, ledger=ledger, model=model, concurrency=2).complete(requests)
    here = LocalChat(EndpointConfig(model, LOCAL, concurrency=4)).complete(requests)
    assert all(reply.failure is None and reply.calls == 1 for reply in (*there, *here))
    assert [plain(reply.text) for reply in there] == [plain(reply.text) for reply in here]
    assert len({reply.text for reply in there}) == len(requests)
    assert [(r.prompt_tokens, r.finished) for r in there] == [(r.prompt_tokens, r.finished) for r in here]
    total = ledger.summary()["total"]
    assert total["prompt_tokens"] == sum(reply.prompt_tokens for reply in here)
    assert total["completion_tokens"] == sum(reply.completion_tokens for reply in there)


def test_what_the_server_refuses_and_a_model_that_writes_no_json(url: str, model: str, quick: None) -> None:
    [odd] = chat(url, model=model, extra_body={"colour": "red"}).complete([ask("hello")])
    assert (odd.failure, odd.calls) == ("refused", 1)
    assert "colour" in odd.message
    [unknown] = chat(url, model="no/such-model", retries=1).complete([ask("hello")])
    assert unknown.failure in ("server", "refused")  # this server answers 500
    assert unknown.message
    [reply] = chat(url, model=model).complete([ask("As JSON?", max_tokens=12, schema={"type": "object"})])
    assert (reply.value, reply.failure, reply.calls) == (None, "invalid", 2)
    assert reply.text
