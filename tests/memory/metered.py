"""A process that serves a meter until it is killed: `python metered.py URL FOLDER`; prints its address."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.memory.meter import Meter


def main(url: str, folder: Path) -> None:
    endpoint = EndpointConfig("m", url, name="test", price_prompt=1e6)
    with Meter(LLMConfig(endpoint, cache=str(folder / "c.sqlite")), folder / "costs.jsonl") as meter:
        print(meter.url("mem0", "conv-1", "extract"), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
