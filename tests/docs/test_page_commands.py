"""Every command and every piece of Python in README.md and docs/ runs as it stands, on small data."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING

import pytest
from doc_commands import Block, Command, page_commands, snippets

if TYPE_CHECKING:
    from doc_desk import Desk


@pytest.mark.slow
@pytest.mark.parametrize("command", page_commands(), ids=str)
def test_a_command_runs(desk: Desk, command: Command) -> None:
    desk.run(command)


@pytest.mark.slow
def test_two_processes_write_what_one_does_and_the_export_opens(desk: Desk) -> None:
    for command in page_commands():
        if command.option("--out") in ("runs/pra", "runs/pra2", "runs/model"):
            desk.run(command)
    config = {name: (desk.folder / "runs" / name / "config.yaml").read_text() for name in ("pra", "pra2")}
    assert config["pra"].replace("runs/pra", "runs/pra2") == config["pra2"]
    assert (desk.folder / "runs" / "model" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("block", snippets(), ids=lambda block: f"{block.page}:{block.line}")
def test_a_snippet_runs(desk: Desk, block: Block, capsys: pytest.CaptureFixture[str]) -> None:
    if "runs/sae" in "\n".join(block.lines):
        desk.run(next(command for command in page_commands() if command.option("--out") == "runs/sae"))
    source = "\n" * (block.line - 1) + "\n".join(block.lines)
    with contextlib.chdir(desk.folder):
        exec(compile(source, block.page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_dry_run_asks_nothing(desk: Desk) -> None:
    command = next(command for command in page_commands() if command.option("--llm.dry_run"))
    output = desk.run(command)
    rows = (desk.folder / str(command.option("--llm.dry_run"))).read_text().splitlines()
    assert len(rows) > 3
    assert all("gpt-" in row for row in rows)
    assert "USD" in output


@pytest.mark.slow
def test_verdicts_of_the_server_are_in_the_report(desk: Desk) -> None:
    desk.run(next(command for command in page_commands() if command.config == "configs/evaluate_server.yaml"))
    report = json.loads((desk.folder / "runs" / "server" / "x0" / "report.json").read_text())
    assert "gpt-4.1-mini" in json.dumps(report)
