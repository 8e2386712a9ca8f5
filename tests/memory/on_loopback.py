"""A process that runs memory systems before a scripted server: `python on_loopback.py NAMES FOLDER`.

Writes what the server was asked, and what Python connected to, unpickled and started meanwhile, into `seen.json` of
the folder.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

NAMES = {"socket.connect", "socket.sendto", "socket.getaddrinfo", "pickle.find_class", "os.system", "os.exec",
         "os.posix_spawn", "subprocess.Popen"}  # fmt: skip
#: What the environment holds that no package may see, or act on.
SECRET = "sk-of-the-user-0123456789"
KEYS = ("OPENAI_API_KEY", "OPENROUTER_API_KEY", "MEM0_API_KEY", "LANGSMITH_API_KEY", "OPENAI_ADMIN_KEY")
events: list[tuple[str, str, list[str]]] = []


def watch(name: str, arguments: Any) -> None:
    if name in NAMES:
        frame, via = sys._getframe(1), []
        while frame and len(via) < 40:
            via.append(frame.f_globals.get("__name__", "?"))
            frame = frame.f_back  # type: ignore[assignment]
        events.append((name, repr(arguments)[-200:], via))


def main(names: list[str], folder: Path) -> None:
    for key in KEYS:
        os.environ[key] = SECRET
    os.environ |= {"LANGSMITH_TRACING": "true", "LANGCHAIN_TRACING_V2": "true", "HOME": str(folder)}
    sys.addaudithook(watch)
    sys.path[:0] = [str(Path(__file__).parents[1] / name) for name in ("llm", "memory")]
    from fault_proxy import Proxy
    from remembering import answer, locomo
    from running import use_words

    from remind.llm.endpoints import EndpointConfig, LLMConfig
    from remind.memory.config import RunMemoryConfig
    from remind.memory.run import run_memory

    use_words()
    (folder / "talk.json").write_text(json.dumps(locomo()))
    with Proxy(answer=answer) as proxy:
        llm = LLMConfig(EndpointConfig("m", proxy.url), cache=str(folder / "cache.sqlite"))
        hits = []
        # again, with nothing but the cache
        for out in ("run", "again"):
            given = (str(folder / "talk.json"), str(folder / out), names)
            run_memory(RunMemoryConfig(*given, k=[1], budgets=[30], llm=llm))
            hits.append(proxy.hits)
    seen = {"events": events, "heads": list(proxy.heads), "bodies": proxy.bodies, "hits": hits}
    (folder / "seen.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
    # torch's own threads now and then abort a process that tears down as usual
    os._exit(0)
