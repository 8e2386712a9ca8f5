"""The command `remind`: its table, its help, the shipped configs, and how little is imported for it."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from dataclasses import MISSING
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
#: The command, or the config class of an experiment, that takes a kind of shipped config no command is named after.
#: Some are a part of a config, given after one that names the rest.
KINDS = {
    **dict.fromkeys(("baselines", "memory"), "run-memory"),
    **dict.fromkeys(("build", "grounding"), "build-states"),
    **dict.fromkeys(("adrpo", "membuilder", "salimory"), "train-memory"),
    "objective": "train-pra",
    "chain": "experiments.chain.config:ChainConfig",
    "inference": "experiments.cost:InferenceCostConfig",
    "policies": "experiments.policies:PoliciesConfig",
    "proof": "experiments.proof.config:ProofConfig",
}
#: Words that are needed besides those that all must give.
MORE = {"chain": ["--build.input=i"], "inspect": ["--question=q"]}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_a_config_and_a_function(name: str) -> None:
    command = COMMANDS[name]
    assert dataclasses.is_dataclass(command.config_type())
    assert callable(resolve_name(command.function))
    assert set(command.positional) <= {field.name for field in dataclasses.fields(command.config_type())}


SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "accelerate")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_shipped_config_is_taken_by_its_command(path: Path) -> None:
    kind = path.stem.split("_")[0]
    name = KINDS.get(kind) or next(name for name in COMMANDS if kind in name.split("-"))
    config = COMMANDS[name].config_type() if name in COMMANDS else resolve_name(name)
    needed = [field.name for field in dataclasses.fields(config) if field.default is field.default_factory is MISSING]
    words = [*(f"--{name}=x" for name in needed), *MORE.get(kind, ())]
    settings = parse(config, "", ["--config", str(path), *words])
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
