"""What the README says of the checkout holds: paths, links, options, modules, targets of make, help of every script."""

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
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from doc_commands import (
    CONFIGS,
    README,
    ROOT,
    Command,
    block_commands,
    blocks,
    notebook_commands,
    readme_commands,
    span_commands,
    spans,
    table_commands,
)

SCRIPTS = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
#: It has a command line of its own, since it measures in a process free of ours.
PLAIN = "bench_sae.py"
#: What the README shortens to a word: the rest of the line, or a file of one's own.
ELIDED = {"…": "[locomo10.json]"}
#: What a script cannot do without, where the table of measurements leaves it out.
REQUIRED = {"--out": "o", "--input": "i", "--states": "s", "--model": "m", "--labels": "l", "--references": "r"}
#: Folders of the checkout that the text names paths in.
FOLDERS = ("configs/", "docs/", "scripts/", "tests/", "notebooks/", "remind/", "sae/")


@cache
def parser_of(script: str) -> Any:
    """The argument parser of a script, without running it."""
    found: list[Any] = []

    def keep(config: type, run: object, description: str, argv: object = None) -> None:
        from remind.core.cli import _Parser, _plain_defaults

        parser = _Parser(description=description, exit_on_error=True)
        parser.add_argument("--config", action="config", help="YAML file")
        parser.add_class_arguments(config, nested_key=None, as_group=False, fail_untyped=True)
        _plain_defaults(parser)
        found.append(parser)

    with mock.patch("remind.core.cli.main", keep), mock.patch.object(sys, "argv", [script]):
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    return found[0]


def run_plain(words: list[str]) -> tuple[int, str, str]:
    """Status, output and complaints of the script with a command line of its own."""
    line = [sys.executable, str(ROOT / "scripts" / PLAIN), *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


@cache
def plain_help() -> str:
    status, page, _ = run_plain(["--help"])
    assert status == 0
    return page


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_field(script: str) -> None:
    if script == PLAIN:
        return _plain_help_explains()
    page = io.StringIO()
    with contextlib.redirect_stdout(page), pytest.raises(SystemExit) as end:
        parser_of(script).parse_args(["--help"])
    assert end.value.code == 0
    shown = page.getvalue()
    for action in parser_of(script)._actions:
        if action.help is SUPPRESS or not action.option_strings:
            continue
        assert action.option_strings[-1] in shown
        assert str(action.help or "").strip(), f"{script}: {action.option_strings[-1]} has no description"
    return None


def _plain_help_explains() -> None:
    for option in ("--sizes", "--dead", "--aux_stride", "--no_sae_lens", "--backbone"):
        assert option in plain_help()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_mentioned(script: str) -> None:
    pages = [README, ROOT / "Makefile", *CONFIGS.glob("*.yaml")]
    assert any(script in page.read_text(encoding="utf-8") for page in pages), f"{script} is in no document"


@pytest.mark.parametrize("command", table_commands(), ids=str)
def test_a_measured_command_is_one_its_script_takes(command: Command) -> None:
    """They take hours; what they say is held against the script's options, names and types of values."""
    script, *words = [ELIDED.get(word, word) for word in command.words]
    assert script in SCRIPTS
    if script == PLAIN:
        assert all(word in plain_help() for word in words if word.startswith("--"))
        return
    if "--help" not in words:
        _taken(script, words)


@pytest.mark.parametrize("command", notebook_commands(), ids=str)
def test_a_command_of_a_notebook_is_one_its_script_takes(command: Command) -> None:
    assert command.script is not None
    _taken(command.script, list(command.arguments))


def _taken(script: str, words: list[str]) -> None:
    parser = parser_of(script)
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
    for script in SCRIPTS:
        if script != PLAIN:
            known |= {option for action in parser_of(script)._actions for option in action.option_strings}
    known |= {"--print_config", "--config_file"}
    comments = [
        Command(str(path.relative_to(ROOT)), path.stem, line.lstrip("# "))
        for path in sorted(CONFIGS.glob("*.yaml"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith("#")
    ]
    for span in (*spans(), *block_commands(), *comments):
        for option in re.findall(r"(?<![\w-])--[a-z]\w*(?:\.\w+)*", span.text):
            # a field of a section that has no option of its own: of the parser's nested types
            assert option in known or _nested(option, known), f"{span.place}: no script has {option}"


def _nested(option: str, known: set[str]) -> bool:
    """Fields of optional groups (llm.default.base_url) are no options of their own, their group is."""
    return any(option.startswith(f"{name}.") for name in known)


def test_paths_links_and_pictures_are_there() -> None:
    text = README.read_text(encoding="utf-8")
    named = re.findall(r"\]\(([^)#]+)\)", text)
    named += [word for span in spans() for word in span.text.split() if word.startswith(FOLDERS)]
    named += [
        word for command in readme_commands() for word in command.words if word.startswith(("scripts/", "configs/"))
    ]
    assert len(named) > 40
    for name in named:
        if not name.startswith("http"):
            assert all((ROOT / one).exists() for one in _spelled_out(name.rstrip("."))), f"README.md names {name}"


def _spelled_out(name: str) -> list[str]:
    """`a_{b,c}.yaml` as two names."""
    if found := re.search(r"\{([^}]*)\}", name):
        return [name.replace(found[0], part) for part in found[1].split(",")]
    return [name]


def test_modules_the_text_names_can_be_imported() -> None:
    for span in spans():
        if re.fullmatch(r"(?:remind|sae)(?:\.[a-z_]+)+(?:\([^)]*\))?", span.text):
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
    told = [*span_commands(), *(command for command in block_commands() if command.script is None)]
    others = {"make": _made, "pip": _installs(extras), "pytest": _tested, "python": lambda words: None}
    for command in told:
        for part in " ".join(command.words).split(" && "):
            program, *words = part.split()
            if program == "jupyter":
                assert list((ROOT / words[-1]).glob("*.ipynb"))
            else:
                assert program in others, f"{command}: no way to check {program}"
                others[program](words)


def _made(words: list[str]) -> None:
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    named = re.findall(r"(?:scripts|configs)/[\w.]+", done.stdout)
    assert all((ROOT / name).is_file() for name in named)


def _installs(extras: dict[str, Any]) -> Callable[[list[str]], None]:
    def check(words: list[str]) -> None:
        assert words[0] == "install"
        for name in re.findall(r"\[([\w,-]+)\]", words[-1]):
            assert set(name.split(",")) <= set(extras)

    return check


def _tested(words: list[str]) -> None:
    assert all((ROOT / word).exists() for word in words if not word.startswith("-"))


def test_no_two_commands_write_the_same_folder() -> None:
    """What a command wrote another one refuses to replace; a reader who types them all must meet no refusal."""
    going_on = {"--adjudicated", "--llm.dry_run"}
    written: dict[str, Command] = {}
    for command in block_commands():
        out = command.option("--out")
        if out and not going_on & set(command.words):
            assert out not in written, f"{command} and {written[out]} both write {out}"
            written[out] = command


def test_json_in_the_readme_is_read_as_it_says(tmp_path: Path) -> None:
    """The format's example, its broken lines joined, is a file that the reader takes."""
    from remind import read

    (block,) = blocks("json")
    text = "".join(block.lines)
    records = [part for part in re.split(r"(?<=\})(?=\{\"type\")", text) if part]
    (tmp_path / "example.jsonl").write_text("\n".join(records), encoding="utf-8")
    corpus = read(tmp_path / "example.jsonl")
    assert [question.id for question in corpus.questions] == ["q0001"]
    assert corpus.dialogues[0].turn("s1:1").images[0].caption == "a red bike"


def test_every_format_of_the_table_is_one_that_is_read() -> None:
    from remind.data.readers import FORMATS

    rows = [line for line in README.read_text(encoding="utf-8").splitlines() if re.match(r"\| `\w+` \| ", line)]
    named = {match[1] for row in rows if (match := re.match(r"\| `(\w+)` \|", row))}
    assert set(FORMATS) <= named


def test_headings_are_reached_in_order() -> None:
    """Blocks of commands stand under headings, so that a failure can be found."""
    lines = [int(command.place.split(":")[1]) for command in block_commands()]
    assert all(before < after for before, after in pairwise(lines))
    assert all(command.section for command in block_commands())
