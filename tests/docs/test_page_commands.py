"""Every command and every piece of Python in README.md, docs/ and comments of configs runs as it stands."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import yaml
from doc_commands import CONFIGS, ROOT, Block, Command, comment_commands, page_commands, snippets
from doc_demo import check_demo
from doc_desk import DEMO, Desk, output_of

#: Outputs that other commands read; the commands of the configs write them again with the same content.
SHARED = ("runs/refmem",)


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    """A folder in which the commands run."""
    return Desk(tmp_path_factory.mktemp("desk"))


@pytest.mark.slow
def test_the_demo_runs_through(desk: Desk) -> None:
    """First, so that what an earlier demo left is in its way. Tiny sizes; `make demo` has the real ones."""
    out = desk.folder / "runs" / "demo"
    earlier = out / "run-pra"
    (earlier / "checkpoint-9").mkdir(parents=True)
    (earlier / "config.yaml").write_text("states: elsewhere\n")
    text = desk.run(DEMO)
    assert not (earlier / "checkpoint-9").exists()
    check_demo(text, out)


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
    for name in ("runs/sae", "runs/states"):
        if name in "\n".join(block.lines):
            writers = (c for c in page_commands() if c.option("--out") == name and not c.option("--llm.dry_run"))
            desk.run(next(writers))
    source = "\n" * (block.line - 1) + "\n".join(block.lines)
    with contextlib.chdir(desk.folder):
        exec(compile(source, block.page, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip()


@pytest.mark.slow
def test_a_dry_run_lists_what_would_be_asked(desk: Desk) -> None:
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


def config_commands() -> list[Command]:
    """Those of the configs that are not in the pages, each once, with a launcher or without."""
    commands = {(command.program, command.arguments): command for command in comment_commands()}
    pages = {(command.program, command.arguments) for command in page_commands()}
    return [command for key, command in commands.items() if key not in pages]


# last, since they replace what commands of the pages have written
@pytest.mark.slow
@pytest.mark.parametrize("command", config_commands(), ids=str)
def test_a_command_of_a_config_runs(desk: Desk, command: Command) -> None:
    out = output_of(command)
    if out and out not in SHARED and (desk.folder / out).exists():
        shutil.rmtree(desk.folder / out)
    desk.run(command)


def test_every_config_is_used_by_a_command_that_runs() -> None:
    commands = [*page_commands(), *comment_commands()]
    used = {word for command in commands for word in command.words if word.startswith("configs/")}
    # configs/demo.yaml is for `make demo`
    paths = (path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "accelerate")
    files = {str(path.relative_to(ROOT)) for path in paths} - {"configs/demo.yaml"}
    assert files <= used


@pytest.mark.parametrize("path", sorted((CONFIGS / "accelerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_takes_its_configs(path: Path) -> None:
    """The launchers for GPUs are read here; that they shard and train is tested where two processes do."""
    from accelerate.commands.config.config_args import load_config_from_file

    loaded = load_config_from_file(str(path))
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert loaded.num_processes == 2
    assert set(settings) <= set(vars(loaded))
    assert loaded.mixed_precision == settings["mixed_precision"]
