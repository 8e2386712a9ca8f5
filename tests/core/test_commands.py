"""The command `remind`: its table, its help, and how little is imported for it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from remind.commands import COMMANDS, main, resolve
from remind.core.cli import parse

ROOT = Path(__file__).parents[2]
#: Libraries that take long to import; none may be needed for help or for a mistake on the command line.
HEAVY = ("torch", "transformers", "pyarrow", "sklearn", "scipy", "sentence_transformers", "matplotlib", "sae_lens")


def imported(code: str) -> list[str]:
    """The heavy libraries that a fresh process has imported after `code`."""
    words = f"import sys\n{code}\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", words], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1].replace("'", '"'))


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_a_config_and_a_function(name: str) -> None:
    command = COMMANDS[name]
    assert dataclasses.is_dataclass(command.config_type())
    assert callable(resolve(command.function))
    fields = {field.name for field in dataclasses.fields(command.config_type())}
    assert set(command.positional) <= fields


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["--help"]):
        main(argv)
        page = capsys.readouterr().out
        assert all(f"  {name} " in page and command.help in page for name, command in COMMANDS.items())


def test_an_unknown_command_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["train"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: no command 'train'")
    assert said.count("\n") == 1


def test_leading_words_of_compare_are_its_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["compare", str(tmp_path / "one"), str(tmp_path / "two")])
    assert stop.value.code == 2
    assert f"{tmp_path / 'one'}" in capsys.readouterr().err


def test_scripts_are_the_commands() -> None:
    """scripts/ holds one wrapper for each command and nothing else."""
    wrapped = {path.read_text(encoding="utf-8").split('run("')[1].split('"')[0] for path in scripts()}
    assert wrapped == set(COMMANDS)
    assert len(scripts()) == len(COMMANDS)


def scripts() -> list[Path]:
    return sorted((ROOT / "scripts").glob("*.py"))


def test_the_defaults_of_the_demo_are_its_config_file() -> None:
    """So that an installed `remind demo` does what `make demo` does."""
    config = COMMANDS["demo"].config_type()
    assert parse(config, "", ["--config", str(ROOT / "configs" / "demo.yaml")]) == config()


@pytest.mark.parametrize("code", ["import remind", "from remind import commands; commands.main(['--help'])"])
def test_nothing_heavy_is_imported_at_the_start(code: str) -> None:
    assert imported(code) == []


#: Commands whose config module still imports something heavy while it is parsed.
SLOW_HELP = ("demo",)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in SLOW_HELP])
def test_nothing_heavy_is_imported_for_the_help_of_a_command(name: str) -> None:
    code = f"from remind import commands\ntry:\n    commands.main([{name!r}, '--help'])\nexcept SystemExit:\n    pass"
    assert imported(code) == []
