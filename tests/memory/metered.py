"""A process that serves a meter until it is killed: `python metered.py URL FOLDER`; prints its address."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from remind.llm.endpoints import EndpointConfig
from remind.memory.meter import Meter


def main(url: str, folder: Path, encoder: Any = None) -> None:
    endpoint = EndpointConfig("m", url, name="test", price_prompt=1e6)
    with Meter(endpoint, encoder, folder / "c.sqlite", folder / "costs.jsonl") as meter:
        print(meter.url("mem0", "conv-1", "extract"), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    # reports name the encoder, and no text is encoded here
    main(sys.argv[1], Path(sys.argv[2]), type("Encoder", (), {"name": "none"}))
