"""Pools of processes: their environment, and the libraries that are imported once for all of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from remind.core.processes import Termination, spawned_pool

_words: list[str] = []
#: Of the standard library, and imported by nothing else here.
LIBRARY = "stringprep"


def _start(word: str) -> None:
    _words.append(word)


def _about(_: int) -> tuple[list[str], set[str], int]:
    return _words, {name for name in os.environ if name.startswith("POOL_")}, os.getppid()


@pytest.mark.parametrize("libraries", [(), (LIBRARY,)], ids=["spawned", "copied"])
def test_processes_begin_in_the_environment_of_their_pool(
    libraries: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = set()
    # the fork server of the second pool has begun in the environment of the first
    for word in ("one", "two"):
        with monkeypatch.context() as changed:
            changed.setenv(f"POOL_{word}", word)
            with spawned_pool(1, _start, (word,), libraries) as pool:
                words, names, parent = pool.submit(_about, 0).result()
            assert (words, names) == ([word], {f"POOL_{word}"})
            parents.add(parent)
    assert len(parents) == 1
    assert (parents == {os.getpid()}) == (not libraries or sys.platform != "linux")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the fork server here")
def test_libraries_are_imported_before_a_process_begins_unless_no_socket_can_be_made(tmp_path: Path) -> None:
    """In processes of their own, since a fork server begins with the first pool. The name of a socket is short."""
    script = tmp_path / "main.py"
    script.write_text(
        "import os, sys\n"
        "from remind.core.processes import spawned_pool\n"
        f"def about(_): return {LIBRARY!r} in sys.modules, os.getppid()\n"
        "if __name__ == '__main__':\n"
        f"    for libraries in (({LIBRARY!r},), ()):\n"
        "        with spawned_pool(1, libraries=libraries) as pool:\n"
        "            imported, parent = pool.submit(about, 0).result()\n"
        "            print(imported, parent == os.getpid())\n"
    )
    long = tmp_path / ("x" * 100)
    long.mkdir()
    cases = {None: "True False", str(long): "False True"}
    for folder, copied in cases.items():
        environment = os.environ if folder is None else {**os.environ, "TMPDIR": folder}
        process = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
        assert process.stdout.splitlines() == [copied, "False True"], process.stderr


def test_signals_are_noted_and_have_their_former_effect_afterwards() -> None:
    numbers = (signal.SIGTERM, signal.SIGINT)
    former = [signal.getsignal(number) for number in numbers]
    with Termination(*numbers) as termination:
        assert not termination.requested
        for number in reversed(numbers):
            os.kill(os.getpid(), number)
        # the first counts
        assert termination.requested == signal.SIGINT
    assert [signal.getsignal(number) for number in numbers] == former
