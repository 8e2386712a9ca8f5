"""The README's further commands run as they stand, on what its first ones leave."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from doc_commands import Command, rest

if TYPE_CHECKING:
    from doc_desk import Desk


@pytest.mark.slow
@pytest.mark.parametrize("command", rest(), ids=str)
def test_a_command_runs(desk: Desk, command: Command) -> None:
    desk.run(command)


def test_a_dry_run_asks_nothing(desk: Desk) -> None:
    command = next(command for command in rest() if command.option("--llm.dry_run"))
    said = desk.run(command)
    rows = (desk.folder / str(command.option("--llm.dry_run"))).read_text().splitlines()
    assert len(rows) > 3
    assert all("gpt-" in row for row in rows)
    assert "USD" in said


def test_verdicts_of_the_server_are_in_the_report(desk: Desk) -> None:
    desk.run(next(command for command in rest() if command.config == "configs/evaluate_server.yaml"))
    report = json.loads((desk.folder / "runs" / "server" / "x0" / "report.json").read_text())
    assert "gpt-4.1-mini" in json.dumps(report)
