"""An empty environment: `pip install .` there, then README.md's Python and the command in an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import README, ROOT, snippets

#: Files of the packages that are no Python and must be installed.
DATA = sorted(
    str(path.relative_to(ROOT))
    for package in ("remind", "sae")
    for path in (ROOT / package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".py", ".pyc")
)
pytestmark = pytest.mark.slow


def run(folder: Path, *words: str | Path, **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | variables
    done = subprocess.run(
        list(map(str, words)), env=environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has what `pip install .` brings and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    source, programs = folder / "source", folder / "venv" / "bin"
    source.mkdir()
    # a copy, so that no build folder is left in the checkout and none of an earlier build gets into the wheel
    for name in ("remind", "sae", "pyproject.toml", "README.md", "LICENSE"):
        run(folder, "cp", "-r", ROOT / name, source)
    run(folder, sys.executable, "-m", "venv", folder / "venv")
    pip = (programs / "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints-cpu.txt")
    # torch goes first and alone: with it in place nothing that follows draws in another build
    run(source, *pip, "torch")
    run(source, *pip, ".")
    return programs


def alone(folder: Path, *words: str | Path) -> str:
    """As whoever has nothing yet: no model hub, no cache."""
    return run(folder, *words, HF_HUB_OFFLINE="1", HOME=str(folder))


def test_all_files_are_installed_and_no_others(programs: Path, tmp_path: Path) -> None:
    code = "from importlib.metadata import files; print(*files('remind-toolkit'), sep='\\n')"
    names = alone(tmp_path, programs / "python", "-c", code).splitlines()
    assert set(DATA) <= set(names)
    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"remind", "sae", ".."}  # .. is the command


def test_the_python_of_the_readme_runs(programs: Path, tmp_path: Path) -> None:
    blocks = [block for block in snippets() if block.page == README.name]
    assert blocks
    code = "\n\n".join("\n".join(block.lines) for block in blocks)
    assert alone(tmp_path, programs / "python", "-c", code).strip()


def test_the_command_runs(programs: Path, tmp_path: Path) -> None:
    assert "build-states" in alone(tmp_path, programs / "remind", "--help")
    # the settings of configs/demo.yaml are its defaults
    assert "d_sae: 256" in alone(tmp_path, programs / "remind", "demo", "--print_config")
