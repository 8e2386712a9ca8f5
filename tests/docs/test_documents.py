"""What the documents say of the checkout holds: paths, links, options, modules, targets of make, help of commands."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import subprocess
import sys
import tomllib
from argparse import SUPPRESS
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from doc_commands import (
    CONFIGS,
    PAGES,
    README,
    ROOT,
    Command,
    block_commands,
    blocks,
    notebook_commands,
    page_commands,
    span_commands,
    spans,
    table_commands,
)

from remind.commands import COMMANDS
from remind.core import cli

#: Modules that are run with `python -m`: experiments, benchmarks, and the picture of the inspector page.
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in ("experiments", "benchmarks", "remind/viewing")
    for path in (ROOT / folder).rglob("*.py")
    if re.search(r"__main__\":\n(    .*\n+)*? +main\(", path.read_text(encoding="utf-8"))
)
#: It has a command line of its own, since it measures in a process free of ours.
PLAIN = "benchmarks.bench_sae"
PROGRAMS = [*COMMANDS, *MODULES]
#: What the pages shorten to a word: the rest of the line, or a file of one's own.
ELIDED = {"…": "[locomo10.json]"}
#: Required options that tables of measurements leave out.
REQUIRED = {
    "--out": "o",
    "--sae": "s",
    "--input": "i",
    "--states": "s",
    "--model": "m",
    "--labels": "l",
    "--references": "r",
}
#: Folders of the checkout that the text names paths in.
FOLDERS = ("configs/", "docs/", "scripts/", "tests/", "notebooks/", "remind/", "sae/", "experiments/", "benchmarks/")


@cache
def parser_of(program: str) -> Any:
    """The argument parser of a command or module, without running it."""
    if program in COMMANDS:
        return cli.make_parser(COMMANDS[program].config_type(), "")
    parsers: list[Any] = []

    def keep(config: type, *_: object, **__: object) -> None:
        parsers.append(cli.make_parser(config, ""))

    with mock.patch.object(cli, "main", keep):
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    return parsers[0]


@cache
def plain_help() -> str:
    line = [sys.executable, "-m", PLAIN, "--help"]
    return subprocess.run(line, capture_output=True, text=True, timeout=240, cwd=ROOT, check=True).stdout


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_explains_every_field(program: str) -> None:
    if program == PLAIN:
        assert all(option in plain_help() for option in ("--sizes", "--dead", "--aux_stride", "--no_sae_lens"))
        return
    page = io.StringIO()
    with contextlib.redirect_stdout(page), pytest.raises(SystemExit) as end:
        parser_of(program).parse_args(["--help"])
    assert end.value.code == 0
    for action in parser_of(program)._actions:
        if action.help is not SUPPRESS and action.option_strings:
            assert action.option_strings[-1] in page.getvalue()
            assert str(action.help or "").strip(), f"{program}: {action.option_strings[-1]} has no description"


def test_every_program_is_in_a_document() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (*PAGES, *CONFIGS.glob("*.yaml")))
    for program in PROGRAMS:
        line = f"remind {program}" if program in COMMANDS else f"python -m {program}"
        assert re.search(rf"{re.escape(line)}(?![\w.-])", text), f"{line} is in no document"


@pytest.mark.parametrize("command", table_commands(), ids=str)
def test_a_measured_command_is_one_its_program_takes(command: Command) -> None:
    """They take hours; their options are checked, names and types of values."""
    program, words = str(command.program), [ELIDED.get(word, word) for word in command.arguments]
    assert program in PROGRAMS
    if program == PLAIN:
        assert all(word in plain_help() for word in words if word.startswith("--"))
    elif "--help" not in words:
        _parse(program, words)


@pytest.mark.parametrize("command", notebook_commands(), ids=str)
def test_a_command_of_a_notebook_is_one_its_program_takes(command: Command) -> None:
    _parse(str(command.program), list(command.arguments))


def _parse(program: str, words: list[str]) -> None:
    parser = parser_of(program)
    needed = [
        word
        for name, value in REQUIRED.items()
        if any(action.required for action in parser._actions if name in action.option_strings) and name not in words
        for word in (name, value)
    ]
    with contextlib.chdir(ROOT):
        parser.parse_args([*words, *needed])


def test_every_option_the_text_names_exists() -> None:
    known: set[str] = set(re.findall(r"--\w+", plain_help()))
    for program in PROGRAMS:
        if program != PLAIN:
            known |= {option for action in parser_of(program)._actions for option in action.option_strings}
    # of accelerate launch, git and pip
    known |= {"--print_config", "--config_file", "--help", "--version"}
    comments = [
        Command(str(path.relative_to(ROOT)), line.lstrip("# "))
        for path in sorted(CONFIGS.glob("*.yaml"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith("#")
    ]
    for span in (*spans(), *block_commands(), *comments):
        for option in re.findall(r"(?<![\w-])--[a-z]\w*(?:\.\w+)*", span.text):
            # a field of a section that has no option of its own: of the parser's nested types
            assert option in known or _nested(option, known), f"{span.place}: no program has {option}"


def _nested(option: str, known: set[str]) -> bool:
    """Fields of optional groups (llm.default.base_url) are no options of their own, their group is."""
    return any(option.startswith(f"{name}.") for name in known)


def test_paths_links_and_pictures_are_there() -> None:
    checked = 0
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not link.startswith("http"):
                assert (page.parent / link).exists(), f"{page.name} links to {link}"
                checked += 1
    names = [word for span in spans() for word in span.text.split() if word.startswith(FOLDERS)]
    names += [
        word for command in page_commands() for word in command.words if word.startswith(("scripts/", "configs/"))
    ]
    for name in names:
        assert all((ROOT / one).exists() for one in _spelled_out(name.rstrip("."))), f"a page names {name}"
    assert checked + len(names) > 60


def _spelled_out(name: str) -> list[str]:
    """`a_{b,c}.yaml` as two names."""
    if found := re.search(r"\{([^}]*)\}", name):
        return [name.replace(found[0], part) for part in found[1].split(",")]
    return [name]


def test_modules_the_text_names_can_be_imported() -> None:
    for span in spans():
        if re.fullmatch(r"(?:remind|sae|experiments|benchmarks)(?:\.[a-z_]+)+(?:\([^)]*\))?", span.text):
            name = span.text.split("(")[0]
            module, _, attribute = name.rpartition(".")
            there = _found(name) or hasattr(importlib.import_module(module), attribute)
            assert there, f"{span.place}: {name}"


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_targets_of_make_and_extras_of_pip_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    others = {"make": _made, "pip": _installs(extras), "pytest": _tested, "cd": _nothing, "git": _nothing}
    for command in (*span_commands(), *block_commands()):
        if command.program:
            continue
        for part in " ".join(command.words).split(" && "):
            program, *words = part.split()
            if program == "jupyter":
                assert list((ROOT / words[-1]).glob("*.ipynb"))
            else:
                assert program in others, f"{command}: no way to check {program}"
                others[program](words)


def _nothing(words: list[str]) -> None:
    """A program that is none of ours."""


def _made(words: list[str]) -> None:
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    named = re.findall(r"(?:scripts|configs)/[\w.]+", done.stdout)
    assert all((ROOT / name).is_file() for name in named)


def _installs(extras: dict[str, Any]) -> Callable[[list[str]], None]:
    def check(words: list[str]) -> None:
        assert words[0] == "install"
        assert all((ROOT / word).is_dir() for word in words[1:] if word == ".")
        for name in re.findall(r"\[([\w,-]+)\]", words[-1]):
            assert set(name.split(",")) <= set(extras)

    return check


def _tested(words: list[str]) -> None:
    assert all((ROOT / word).exists() for word in words if not word.startswith("-"))


def test_no_two_commands_write_the_same_folder() -> None:
    """A command refuses to replace what another one wrote; a reader who types them all must meet no refusal."""
    continued = {"--adjudicated", "--llm.dry_run"}
    written: dict[str, Command] = {}
    for command in block_commands():
        out = command.option("--out")
        if out and not continued & set(command.words):
            other = written.setdefault(out, command)
            assert other.words == command.words, f"{command} and {other} both write {out}"


def test_json_of_the_pages_is_read_as_it_says(tmp_path: Path) -> None:
    """The example of RefMem-Bench JSONL, its broken lines joined, is a file that the reader takes."""
    from remind import read

    (block,) = (block for block in blocks("json") if block.page == "docs/data.md")
    text = "".join(block.lines)
    records = [part for part in re.split(r"(?<=\})(?=\{\"type\")", text) if part]
    (tmp_path / "example.jsonl").write_text("\n".join(records), encoding="utf-8")
    corpus = read(tmp_path / "example.jsonl")
    assert [question.id for question in corpus.questions] == ["q0001"]
    assert corpus.dialogues[0].turn("s1:1").images[0].caption == "a red bike"


def test_every_format_of_the_table_is_one_that_is_read() -> None:
    from remind.data.readers import FORMATS

    lines = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if re.match(r"\| `\w+` \| ", line)]
    named = {match[1] for row in rows if (match := re.match(r"\| `(\w+)` \|", row))}
    assert set(FORMATS) <= named


def test_the_readme_is_short_and_links_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for page in PAGES[1:]:
        name = str(page.relative_to(ROOT))
        assert name in text or name in ("docs/index.md", "docs/reference.md"), f"README.md does not link {name}"
