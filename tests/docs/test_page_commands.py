"""README.md's commands, one of each command of `remind`, and every piece of Python in docs/ run as they stand."""

from __future__ import annotations

import contextlib

import pytest
from doc_commands import README, Block, Command, all_commands, block_commands, snippets
from doc_desk import DEMO, RECIPES, Desk

from remind.commands import COMMANDS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A folder in which the commands run."""
    return Desk(tmp_path_factory.mktemp("desk"))


def chosen() -> list[Command]:
    """All of the README, else the first of each in the quickstart or another page, and one under a launcher."""
    written = [one for one in all_commands() if one.program in COMMANDS]
    first: dict[object, Command] = {DEMO.program: DEMO}
    for command in sorted(written, key=lambda one: not one.page.startswith((README.name, "docs/quickstart"))):
        if command.page.startswith(README.name) and command in block_commands():
            first[command] = command
        kind = "launch" if "configs/accelerate/cpu_2.yaml scripts/train_pra.py" in command.text else command.program
        first.setdefault(kind, command)
    return list(dict.fromkeys(first.values()))


@pytest.mark.parametrize("command", chosen(), ids=str)
def test_a_command_runs(desk: Desk, command: Command) -> None:
    desk.run(command)


def test_all_commands_are_among_them() -> None:
    assert {command.program for command in chosen()} == set(COMMANDS) == set(RECIPES)


# README.md's: tests/core/test_wheel.py
@pytest.mark.parametrize(
    "block",
    [block for block in snippets() if block.page != README.name],
    ids=lambda block: f"{block.page}:{block.number}",
)
def test_a_snippet_runs(desk: Desk, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("runs/sae", "runs/states"):
        if name in "\n".join(block.lines):
            desk.provide(name, block.page)
    with contextlib.chdir(desk.folder):
        exec(compile("\n".join(block.lines), block.page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
