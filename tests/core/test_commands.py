"""The command `remind`: its table, its help, the shipped configs, and how little is imported for it."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import yaml

from remind.commands import COMMANDS, main
from remind.core.cli import parse
from remind.core.run_folder import as_dict, flatten

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
#: Libraries that take long to import; none may be needed for help or for a mistake on the command line.
HEAVY = ("torch", "transformers", "pyarrow", "sklearn", "scipy", "sentence_transformers", "matplotlib", "sae_lens")
#: For each kind of shipped config the command, or the config class of an experiment, that takes it, and required words.
KINDS = {
    # a part of a config, given after one that names the rest
    "baselines": ("run-memory", "--input i"),
    "build": ("build-states", "--input i --out o"),
    "adrpo": ("train-memory", ""),
    "chain": ("experiments.chain.config:ChainConfig", "--build.input i --out o"),
    "demo": ("demo", ""),
    "evaluate": ("evaluate", "--states s --model m --out o"),
    "feature": ("feature-pages", ""),
    # a part of a config, given after one that names the rest
    "grounding": ("build-states", "--input i --out o"),
    "inference": ("experiments.cost:InferenceCostConfig", ""),
    "inspect": ("inspect", "--question q"),
    "objective": ("train-pra", "--states s --out o"),
    "pra": ("train-pra", "--states s --out o"),
    "policies": ("experiments.policies:PoliciesConfig", ""),
    "proof": ("experiments.proof.config:ProofConfig", "--model m --out o"),
    "membuilder": ("train-memory", ""),
    "memory": ("run-memory", ""),
    "refmem": ("build-refmem", "--input i --out o"),
    "sae": ("train-sae", "--out o"),
    "salimory": ("train-memory", ""),
    "world": ("make-world", "--out o"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_a_config_and_a_function(name: str) -> None:
    command = COMMANDS[name]
    assert dataclasses.is_dataclass(command.config_type())
    assert callable(resolve_name(f"remind.{command.function}"))
    assert set(command.positional) <= {field.name for field in dataclasses.fields(command.config_type())}


SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "accelerate")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_config_is_taken_by_its_command(path: Path) -> None:
    name, required = KINDS[path.stem.split("_")[0]]
    config = COMMANDS[name].config_type() if name in COMMANDS else resolve_name(name)
    settings = parse(config, "", ["--config", str(path), *required.split()])
    assert isinstance(settings, config)
    taken, given = flatten(as_dict(settings)), flatten(yaml.safe_load(path.read_text(encoding="utf-8")))
    # those of groups, too, arrive; names of choices and numbers, but no lists
    arrived = {key: taken.get(key) for key, value in given.items() if isinstance(value, bool | int | float)}
    assert arrived == {key: given[key] for key in arrived}
    # an installed `remind demo` does what `make demo` does
    assert name != "demo" or settings == config()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["build-stats"], "no command 'build-stats'; did you mean build-states?"),
        (["train"], "no command 'train'"),
        (["compare", "/no/one", "/no/two"], "/no/one"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1


def test_nothing_heavy_is_imported_for_help() -> None:
    """In a fresh process: at the import of remind, for the help of the whole, then for that of each command."""
    helps = [["--help"], *([name, "--help"] for name in COMMANDS)]
    code = f"""
import contextlib, io, sys
def heavy(): return [name for name in {HEAVY} if name in sys.modules]
import remind
imported = {{"remind": heavy()}}
from remind import commands
for argv in {helps}:
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        commands.main(argv)
    imported[argv[0]] = heavy()
print(imported)
"""
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = ast.literal_eval(process.stdout)
    assert len(imported) == len(helps) + 1
    assert {name: libraries for name, libraries in imported.items() if libraries} == {}
