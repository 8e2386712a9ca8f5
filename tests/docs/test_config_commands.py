"""Commands in the comments of configs, and in docstrings, run as they stand; no config is left out."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import yaml
from doc_commands import CONFIGS, ROOT, Command, comment_commands, docstring_commands, page_commands, runnable

if TYPE_CHECKING:
    from doc_desk import Desk

#: Run by `make demo` alone.
BY_MAKE = {"configs/demo.yaml"}


def others() -> list[Command]:
    """Those that are not in the pages word for word, where they run too."""
    there = {command.words for command in page_commands()}
    return [command for command in (*comment_commands(), *docstring_commands()) if command.words not in there]


@pytest.mark.slow
@pytest.mark.parametrize("command", others(), ids=str)
def test_a_command_runs(desk: Desk, command: Command) -> None:
    from doc_desk import made_by

    # each file speaks for itself: its command is not told where another one has written
    made = made_by(command)
    if made and made not in KEPT and (desk.folder / made).exists():
        shutil.rmtree(desk.folder / made)
    desk.run(command)


#: What other commands read; none of the commands here writes them but with the same content.
KEPT = ("runs/refmem",)


def test_every_config_is_used_by_a_command_that_runs() -> None:
    used = {word for command in runnable() for word in command.words if word.startswith("configs/")}
    there = {str(path.relative_to(ROOT)) for path in CONFIGS.rglob("*.yaml")}
    unused = there - used - BY_MAKE
    assert {path for path in unused if "accelerate" not in path} == set()


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_its_configs(path: object) -> None:
    """The launchers for GPUs are read here; that they shard and train is tested where two processes do."""
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(path))
    told = yaml.safe_load(open(str(path), encoding="utf-8"))  # noqa: SIM115
    assert loaded.num_processes == 2
    assert set(told) <= set(vars(loaded))
    assert loaded.mixed_precision == told["mixed_precision"]
