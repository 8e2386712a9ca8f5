"""What the documents say of the checkout holds: commands, options, paths, links, modules, targets of make, files."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import warnings
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from doc_commands import CONFIGS, PAGES, ROOT, Command, all_commands, blocks, spans
from in_process import run_module

from remind import read
from remind.commands import COMMANDS
from remind.core import cli
from remind.data.readers import FORMATS

#: Modules that are run with `python -m`: experiments, benchmarks, and the picture of the inspector page.
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in ("experiments", "benchmarks", "remind/viewing")
    for path in (ROOT / folder).rglob("*.py")
    if re.search(r"__main__\":\n(    .*\n+)*? +main\(", path.read_text(encoding="utf-8"))
)
#: They have command lines of their own: one measures in a process free of ours, one runs where jsonargparse is not.
PLAIN = ("benchmarks.bench_sae", "benchmarks.count_files", "benchmarks.gpu")
PROGRAMS = [*COMMANDS, *MODULES]
#: Required options that measurements leave out.
REQUIRED = ("--out", "--sae", "--input", "--states", "--model", "--labels", "--references", "--data")
#: Folders of the checkout that the text names paths in.
FOLDERS = ("configs/", "docs/", "scripts/", "tests/", "notebooks/", "remind/", "sae/", "experiments/", "benchmarks/")


@cache
def program_of(program: str) -> tuple[type, dict[str, Any]]:
    """The config of a command or module, and how its words are read, without running it."""
    if program in COMMANDS:
        command = COMMANDS[program]
        return command.config_type(), {"positional": command.positional, "repeatable": command.repeatable}
    found: list[tuple[type, dict[str, Any]]] = []
    keep = mock.patch.object(cli, "main", lambda config, *_, **more: found.append((config, more)))
    with keep, warnings.catch_warnings():
        # another test may have imported the module
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    config, more = found[0]
    if config.__module__ == "__main__":
        config = getattr(importlib.import_module(program), config.__name__)
    return config, more


def test_every_program_and_every_config_is_in_a_document() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (*PAGES, *CONFIGS))
    for program in PROGRAMS:
        line = f"remind {program}" if program in COMMANDS else f"python -m {program}"
        assert re.search(rf"{re.escape(line)}(?![\w.-])", text), f"{line} is in no document"
    used = {word for command in all_commands() for word in command.words if word.startswith("configs/")}
    # configs/demo.yaml is for `make demo`; launchers are read below
    files = {str(path.relative_to(ROOT)) for path in CONFIGS if path.parent.name != "accelerate"}
    assert files - {"configs/demo.yaml"} <= used


@pytest.mark.parametrize("command", all_commands(), ids=str)
def test_a_command_is_one_its_program_takes(command: Command) -> None:
    """With its config, as it reads a command line: options, types and ranges."""
    program, words = str(command.program), ["[locomo10.json]" if word == "…" else word for word in command.arguments]
    assert program in PROGRAMS
    if program in PLAIN:
        assert all(word in run_module(program, "--help")[1] for word in words if word.startswith("--"))
    elif "--help" not in words:
        config, more = program_of(program)
        files = (word for before, word in pairwise(words) if before == "--config")
        given = {f"--{name}" for file in files for name in yaml.safe_load((ROOT / file).read_text("utf-8")) or {}}
        actions = cli.make_parser(config, "")._actions
        required = {name for action in actions if action.required for name in action.option_strings}
        missing = [word for name in REQUIRED if name in required - given - {*words} for word in (name, "x")]
        said = io.StringIO()
        with contextlib.chdir(ROOT), contextlib.redirect_stderr(said):
            try:
                cli.main(config, lambda _: None, "", [*words, *missing], **more)
            except SystemExit:
                pytest.fail(f"{command}: {said.getvalue()}", pytrace=False)


def test_paths_and_links_are_there() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"
    names = [word for span in spans() for word in span.text.split() if word.startswith(FOLDERS)]
    names += [word for line in all_commands() for word in line.words if word.startswith(("scripts/", "configs/"))]
    for name in names:
        # `a_{b,c}.yaml` is two names
        before, braces, after = re.fullmatch(r"([^{]*)(?:\{([^}]*)\})?(.*?)\.?", name).groups("")  # type: ignore[union-attr]
        paths = [f"{before}{part}{after}" for part in braces.split(",")]
        assert all((ROOT / path).exists() for path in paths), f"a page names {name}"


def test_modules_the_text_names_can_be_imported() -> None:
    # the page on migration names what is gone
    for span in (span for span in spans() if not span.page.startswith("docs/migration.md")):
        if re.fullmatch(r"(?:remind|sae|experiments|benchmarks)(?:\.[a-z_]+)+(?:\([^)]*\))?", span.text):
            module, _, attribute = span.text.split("(")[0].rpartition(".")
            imported = importlib.import_module(module)
            is_module = hasattr(imported, "__path__") and importlib.util.find_spec(f"{module}.{attribute}")
            assert is_module or hasattr(imported, attribute), f"{span.page}: {span.text}"


def test_files_of_the_page_on_data_are_read_as_it_says(tmp_path: Path) -> None:
    """The chat, questions of one's own, the example of RefMem-Bench JSONL, and a mapping of JSON."""
    chat, asked, records, _ = (block for block in blocks("json") if block.page == "docs/data.md")
    (tmp_path / "keys.png").touch()
    (tmp_path / "chat.jsonl").write_text("\n".join(chat.lines), encoding="utf-8")
    (dialogue,) = read(tmp_path / "chat.jsonl", "chat").dialogues
    assert (dialogue.id, dialogue.turn("march:T2").images[0].caption) == ("us", "a keyboard")
    (tmp_path / "asked.jsonl").write_text("".join(asked.lines), encoding="utf-8")
    [question] = read(tmp_path / "asked.jsonl").questions
    assert (question.format, question.answers, question.evidence) == ("single", ("B",), ("S1:T1",))
    lines = [part for part in re.split(r"(?<=\})(?=\{\"type\")", "".join(records.lines)) if part]
    (tmp_path / "example.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert [question.id for question in read(tmp_path / "example.jsonl").questions] == ["q0001"]
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert set(FORMATS) <= set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
