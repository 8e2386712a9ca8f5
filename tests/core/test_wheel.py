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


def run(line: list[str], **variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(line, env={**environment, **variables}, cwd="/", capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_works_without_the_checkout(tmp_path: Path) -> None:
    source, installed = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    # a copy, so that no build folder is left in the checkout and none of an earlier build gets into the wheel
    for name in ("remind", "sae", "pyproject.toml", "README.md", "LICENSE"):
        run(["cp", "-r", str(ROOT / name), str(source)])
    pip, offline = [sys.executable, "-m", "pip"], ["--quiet", "--no-deps", "--no-index"]
    run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)])
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert set(DATA) <= set(names)
    tops = {name.split("/")[0] for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert tops == {"remind", "sae"}

    run([*pip, "install", *offline, "--target", str(installed), str(wheel)])
    code = "import remind, sae; from remind.data.sample import sample_path; print(remind.__file__, sae.__file__, "
    code += "len(remind.read(sample_path() / 'test.jsonl').questions))"
    *files, count = run([sys.executable, "-c", code], PYTHONPATH=str(installed)).split()
    assert all(Path(file).is_relative_to(installed) for file in files)
    assert int(count) == 48
    # the settings of configs/demo.yaml are its defaults
    command = [str(installed / "bin" / "remind"), "demo", "--print_config"]
    assert "d_sae: 256" in run(command, PYTHONPATH=str(installed))
