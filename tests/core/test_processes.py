"""Pools of processes: what they share, and what they are told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remind.core.processes import spawned_pool

_found: list[str] = []
#: Of the standard library, and imported by nothing else here.
LIBRARY = "stringprep"


def _start(word: str) -> None:
    _found.append(word)


def _tell(_: int) -> tuple[list[str], set[str], int]:
    return _found, {name for name in os.environ if name.startswith("POOL_")}, os.getppid()


@pytest.mark.parametrize("libraries", [(), (LIBRARY,)], ids=["spawned", "copied"])
def test_processes_begin_in_the_environment_of_their_pool(
    libraries: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = set()
    # what is copied for the second pool has begun in the environment of the first
    for word in ("one", "two"):
        with monkeypatch.context() as changed:
            changed.setenv(f"POOL_{word}", word)
            with spawned_pool(2, _start, (word,), libraries) as pool:
                for found, names, parent in pool.map(_tell, range(4)):
                    assert (found, names) == ([word], {f"POOL_{word}"})
                    parents.add(parent)
    assert len(parents) == 1
    assert (parents == {os.getpid()}) == (not libraries or sys.platform != "linux")


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")
def test_libraries_are_there_before_a_process_begins(tmp_path: Path) -> None:
    """In a process of its own: the one that is copied begins with the first pool, whichever asks for it."""
    script = tmp_path / "main.py"
    script.write_text(
        "import sys\n"
        "from remind.core.processes import spawned_pool\n"
        "def there(_): return 'stringprep' in sys.modules\n"
        "if __name__ == '__main__':\n"
        "    for libraries in (('stringprep',), ()):\n"
        "        with spawned_pool(1, libraries=libraries) as pool:\n"
        "            print(list(pool.map(there, [0])))\n"
    )
    told = _run(script)
    assert told.stdout.split() == ["[True]", "[False]"], told.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux alone")
def test_where_no_socket_can_be_made_processes_are_spawned(tmp_path: Path) -> None:
    """A socket's name has 107 characters at most."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    script = tmp_path / "main.py"
    script.write_text(
        "import os\n"
        "from remind.core.processes import spawned_pool\n"
        "def parent(_): return os.getppid()\n"
        "if __name__ == '__main__':\n"
        "    with spawned_pool(1, libraries=('stringprep',)) as pool:\n"
        "        print(list(pool.map(parent, [0])) == [os.getpid()])\n"
    )
    told = _run(script, TMPDIR=str(long))
    assert told.stdout.split() == ["True"], told.stderr
    assert _run(script).stdout.split() == ["False"]


def _run(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(script)]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
