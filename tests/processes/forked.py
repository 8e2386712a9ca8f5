"""Scripts as processes that start at once: forked from one that has imported what most of them need.

A new Python needs many seconds for torch, transformers and sentence-transformers alone, a launcher the same once more.
A launcher itself is used where the documents' commands are run.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import TimeoutExpired
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[2]
#: Imported once for all processes of a worker of pytest.
IMPORTED = [
    "remind.train_pra.run",
    "remind.models.backbone",
    "remind.llm.client",
    "remind.build.states",
    "experiments.proof.prove",
    "sae",
    "accelerate",
    "sentence_transformers",
    "torch.distributed.fsdp",
    "transformers.models.bert.modeling_bert",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
]
#: Seconds that the other process has to end by itself when one has failed, as launchers do it.
PATIENCE = 10.0


class Forked:
    """A running script, with what is needed of `subprocess.Popen`; with two processes it stands for both."""

    def __init__(
        self, script: Path, *words: object, environment: Mapping[str, str] = os.environ, processes: int = 1
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(IMPORTED)
        self._folder = TemporaryDirectory(prefix="remind-forked-", ignore_cleanup_errors=True)
        self._said = Path(self._folder.name)
        self._processes: list[Any] = []
        for rank, joined in enumerate(_joined(processes)):
            given = (str(script), [str(word) for word in words], {**environment, **joined})
            for name in ("out", "err"):  # a process may be killed before it opens them
                (self._said / f"{rank}.{name}").touch()
            process = context.Process(target=_child, args=(*given, str(self._said), rank))
            process.start()
            self._processes.append(process)

    @property
    def returncode(self) -> int | None:
        """0 when all have ended well; else of the first that has failed."""
        codes = [process.exitcode for process in self._processes]
        return None if None in codes else next(filter(None, codes), 0)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float = 900.0) -> int:
        """Raises TimeoutExpired."""
        until = time.monotonic() + timeout
        while (code := self.returncode) is None:
            if any(process.exitcode for process in self._processes):
                for process in self._processes:
                    process.join(PATIENCE)
                self.kill()
            elif time.monotonic() > until:
                raise TimeoutExpired("script", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        for process in self._processes:
            if process.exitcode is None:
                os.kill(process.pid, number)

    def kill(self) -> None:
        """All of them and whatever they have started."""
        for process in self._processes:
            process.kill()
            with suppress(ProcessLookupError):  # it has no group of its own yet, or is gone
                os.killpg(process.pid, signal.SIGKILL)

    def communicate(self, timeout: float = 900.0) -> tuple[str, str]:
        """Wait for the end; standard output and standard error. Raises TimeoutExpired."""
        self.wait(timeout)
        ranks = range(len(self._processes))
        out, errors = ("".join((self._said / f"{n}.{name}").read_text() for n in ranks) for name in ("out", "err"))
        return out, errors


def _joined(processes: int) -> list[dict[str, str]]:
    """What a launcher tells each of several processes of one machine."""
    if processes == 1:
        return [{}]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true"}
    common |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "ACCELERATE_MIXED_PRECISION": "no"}
    return [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def _child(script: str, words: list[str], environment: dict[str, str], said: str, rank: int) -> None:
    gc.freeze()  # what was imported before the fork is no garbage
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}/{rank}.{name}", os.O_WRONLY | os.O_CREAT), number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.argv[:] = [script, *words]
    sys.path.insert(0, str(Path(script).parent))
    import torch

    # read once, before the fork
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    runpy.run_path(script, run_name="__main__")
