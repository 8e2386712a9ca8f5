"""A process that asks: `python asker.py URL CACHE COUNT OUT [DIE_AFTER]`, for tests of what processes share.

Writes a line to OUT for each reply as it comes: index, whether it was cached, text, failure. Kills itself with SIGKILL
from inside the callback once DIE_AFTER replies were given out.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from remind.llm.cache import ReplyCache
from remind.llm.client import OpenAIChat
from remind.llm.endpoints import EndpointConfig
from remind.llm.ledger import Ledger
from remind.llm.request import Message, Reply, Request


def main(url: str, path: str, count: int, out: str, die_after: int = 0) -> None:
    ledger = Ledger()
    endpoint = EndpointConfig("m", url, name="test", concurrency=4, timeout=60, price_prompt=1e6, price_completion=0)
    chat = OpenAIChat(endpoint, ReplyCache(path), ledger)
    requests = [Request((Message("user", f"question {n}"),), "judge", f"s{n}", max_tokens=4) for n in range(count)]
    given = 0
    if gate := os.environ.get("GATE"):
        Path(f"{out}.ready").touch()
        while not Path(gate).exists():
            time.sleep(0.005)
    with Path(out).open("a", encoding="utf-8") as file:

        def on_reply(index: int, reply: Reply) -> None:
            nonlocal given
            file.write(json.dumps([index, reply.cached, reply.text, reply.failure]) + "\n")
            file.flush()
            given += 1
            if given == die_after:
                os.kill(os.getpid(), signal.SIGKILL)

        chat.complete(requests, on_reply)
        file.write(json.dumps(ledger.summary()["total"]) + "\n")


if __name__ == "__main__":
    url, path, count, out, *rest = sys.argv[1:]
    main(url, path, int(count), out, *map(int, rest))
