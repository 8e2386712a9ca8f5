"""The README's first commands and its Python run as they stand, in the order a reader types them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from doc_commands import Block, Command, first_part, snippets

if TYPE_CHECKING:
    from doc_desk import Desk


@pytest.mark.slow
@pytest.mark.parametrize("command", first_part(), ids=str)
def test_a_command_runs(desk: Desk, command: Command) -> None:
    desk.run(command)


def test_what_the_commands_leave(desk: Desk) -> None:
    """Two processes write what one does, and the aligned model opens as a plain folder."""
    for command in first_part():
        if command.script in ("train_pra.py", "export.py"):
            desk.run(command)
    config = {name: (desk.folder / "runs" / name / "config.yaml").read_text() for name in ("pra", "pra2")}
    assert config["pra"].replace("runs/pra", "runs/pra2") == config["pra2"]
    assert (desk.folder / "runs" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("block", snippets(), ids=lambda block: f"README.md:{block.line}")
def test_a_snippet_runs(desk: Desk, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    for command in first_part():
        if command.option("--out") == "runs/sae":
            desk.run(command)
    source = "\n" * (block.line - 1) + "\n".join(block.lines)
    with contextlib.chdir(desk.folder):
        exec(compile(source, "README.md", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()
