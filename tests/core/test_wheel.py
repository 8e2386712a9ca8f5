"""The wheel: built, installed into an empty folder without network, and used from there without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Files of the packages that are no Python and must be in the wheel.
DATA = sorted(
    str(path.relative_to(ROOT))
    for package in ("remind", "sae")
    for path in (ROOT / package).rglob("*")
    if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".py", ".pyc")
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, source = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("source")
    # a copy, so that no build folder is left in the checkout and none of an earlier build gets into the wheel
    for name in ("remind", "sae", "pyproject.toml", "README.md", "LICENSE"):
        run(["cp", "-r", str(ROOT / name), str(source)])
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    run([*pip, "--wheel-dir", str(folder), str(source)])
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    run([*pip, str(wheel)])
    return folder


def run(line: list[str], **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(line, env={**environment, **variables}, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_their_data(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert set(DATA) <= set(names)
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"remind", "sae"}


@pytest.mark.slow
def test_an_installed_package_is_imported_without_the_checkout(installed: Path) -> None:
    code = "import remind, sae; from remind.data.sample import sample_path; print(remind.__file__, sae.__file__, "
    code += "len(remind.read(sample_path() / 'test.jsonl').questions))"
    where, other, count = run([sys.executable, "-c", code], PYTHONPATH=str(installed)).split()
    assert Path(where).is_relative_to(installed)
    assert Path(other).is_relative_to(installed)
    assert int(count) == 48


@pytest.mark.slow
def test_the_command_of_an_installed_package(installed: Path) -> None:
    command = str(installed / "bin" / "remind")
    assert "build-states" in run([command, "--help"], PYTHONPATH=str(installed))
    page = run([command, "demo", "--help"], PYTHONPATH=str(installed))
    assert page.startswith("usage: remind demo")
    assert "--world.train" in page
    # the settings of configs/demo.yaml are its defaults
    assert "d_sae: 1024" in run([command, "demo", "--print_config"], PYTHONPATH=str(installed))
