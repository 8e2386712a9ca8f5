"""What the documents say of the checkout holds: paths, links, options, modules, targets of make, help of commands."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import subprocess
import tomllib
import warnings
from argparse import SUPPRESS
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
from doc_data import mapped
from in_process import run_module

from remind import read
from remind.commands import COMMANDS
from remind.core import cli
from remind.data.dialogue import Question
from remind.data.readers import FORMATS

#: Modules that are run with `python -m`: experiments, benchmarks, and the picture of the inspector page.
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in ("experiments", "benchmarks", "remind/viewing")
    for path in (ROOT / folder).rglob("*.py")
    if re.search(r"__main__\":\n(    .*\n+)*? +main\(", path.read_text(encoding="utf-8"))
)
#: They have command lines of their own: one measures in a process free of ours, one runs where jsonargparse is not.
PLAIN = {
    "benchmarks.bench_sae": ("--sizes", "--dead", "--no_sae_lens"),
    "benchmarks.count_files": ("pra-step",),
    "benchmarks.gpu": ("--small", "--data", "--limit"),
}
PROGRAMS = [*COMMANDS, *MODULES]
#: What the pages shorten to a word: the rest of the line, or a file of one's own.
ELIDED = {"…": "[locomo10.json]"}
#: Required options that tables of measurements leave out.
REQUIRED = ("--out", "--sae", "--input", "--states", "--model", "--labels", "--references")
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

    with mock.patch.object(cli, "main", keep), warnings.catch_warnings():
        # another test may have imported the module
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    return parsers[0]


@cache
def plain_help(program: str) -> str:
    return run_module(program, "--help")[1]


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_explains_every_field(program: str) -> None:
    if program in PLAIN:
        assert all(option in plain_help(program) for option in PLAIN[program])
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


@pytest.mark.parametrize("command", [*table_commands(), *notebook_commands()], ids=str)
def test_a_command_that_is_not_run_is_one_its_program_takes(command: Command) -> None:
    """Measurements take hours, notebooks have tests of their own; options are checked, names and types of values."""
    program, words = str(command.program), [ELIDED.get(word, word) for word in command.arguments]
    assert program in PROGRAMS
    if program == "experiments.paper":
        words[:2] = ["--action", words[0], "--item", words[1]]
    if program in PLAIN:
        assert all(word in plain_help(program) for word in words if word.startswith("--"))
    elif "--help" not in words:
        parser = parser_of(program)
        required = {name for action in parser._actions if action.required for name in action.option_strings}
        missing = [word for name in REQUIRED if name in required - set(words) for word in (name, "x")]
        with contextlib.chdir(ROOT):
            parser.parse_args([*words, *missing])


def test_every_option_the_text_names_exists() -> None:
    # of accelerate launch, git and pip
    options = {"--print_config", "--config_file", "--help", "--version"}
    options.update(*(re.findall(r"--\w+", plain_help(program)) for program in PLAIN))
    for program in PROGRAMS:
        if program not in PLAIN:
            options |= {option for action in parser_of(program)._actions for option in action.option_strings}
    comments = [
        Command(str(path.relative_to(ROOT)), line.lstrip("# "))
        for path in sorted([*CONFIGS.glob("*.yaml"), *CONFIGS.glob("paper/*.yaml")])
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith("#")
    ]
    for span in (*spans(), *block_commands(), *comments):
        for option in re.findall(r"(?<![\w-])--[a-z]\w*(?:\.\w+)*", span.text):
            # fields of optional groups (llm.default.base_url) are no options of their own, their group is
            exists = option in options or any(option.startswith(f"{name}.") for name in options)
            assert exists, f"{span.place}: no program has {option}"


def test_paths_links_and_pictures_are_there() -> None:
    links = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8"))]
    for page, link in links:
        assert link.startswith("http") or (page.parent / link).exists(), f"{page.name} links to {link}"
    names = [word for span in spans() for word in span.text.split() if word.startswith(FOLDERS)]
    names += [word for line in page_commands() for word in line.words if word.startswith(("scripts/", "configs/"))]
    assert len(links) + len(names) > 60
    for name in names:
        # `a_{b,c}.yaml` is two names
        before, braces, after = re.fullmatch(r"([^{]*)(?:\{([^}]*)\})?(.*?)\.?", name).groups("")
        paths = [f"{before}{part}{after}" for part in braces.split(",")]
        assert all((ROOT / path).exists() for path in paths), f"a page names {name}"


def test_modules_the_text_names_can_be_imported() -> None:
    for span in spans():
        if re.fullmatch(r"(?:remind|sae|experiments|benchmarks)(?:\.[a-z_]+)+(?:\([^)]*\))?", span.text):
            module, _, attribute = span.text.split("(")[0].rpartition(".")
            imported = importlib.import_module(module)
            is_module = hasattr(imported, "__path__") and importlib.util.find_spec(f"{module}.{attribute}")
            assert is_module or hasattr(imported, attribute), f"{span.place}: {span.text}"


def test_targets_of_make_and_extras_of_pip_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    lines = [command for command in (*span_commands(), *block_commands()) if not command.program]
    for program, *words in (part.split() for line in lines for part in " ".join(line.words).split(" && ")):
        if program == "make":
            process = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert process.returncode == 0, process.stderr
            assert all((ROOT / name).is_file() for name in re.findall(r"(?:scripts|configs)/[\w.]+", process.stdout))
        elif program == "pip":
            assert words[0] == "install"
            names = [name for listed in re.findall(r"\[([\w,-]+)\]", words[-1]) for name in listed.split(",")]
            assert set(names) <= set(extras)
        elif program == "pytest":
            assert all((ROOT / word).exists() for word in words if not word.startswith("-"))
        elif program == "jupyter":
            assert list((ROOT / words[-1]).glob("*.ipynb"))
        else:
            assert program in ("cd", "git"), f"no way to check {program}"


def test_json_of_the_pages_is_read_as_it_says(tmp_path: Path) -> None:
    """The chat, and the example of RefMem-Bench JSONL with its broken lines joined, are files that the readers take."""
    chat, asked, block, _ = (block for block in blocks("json") if block.page == "docs/data.md")
    (tmp_path / "keys.png").touch()
    (tmp_path / "chat.jsonl").write_text("\n".join(chat.lines), encoding="utf-8")
    (dialogue,) = read(tmp_path / "chat.jsonl", "chat").dialogues
    assert (dialogue.id, dialogue.sessions[0].time) == ("us", "2024-03-01")
    assert dialogue.turn("march:T2").images[0].caption == "a keyboard"
    (tmp_path / "asked.jsonl").write_text("".join(asked.lines), encoding="utf-8")
    [question] = read(tmp_path / "asked.jsonl").questions
    assert (question.format, question.answers, question.evidence, question.split) == (
        "single",
        ("B",),
        ("S1:T1",),
        "test",
    )
    text = "".join(block.lines)
    records = [part for part in re.split(r"(?<=\})(?=\{\"type\")", text) if part]
    (tmp_path / "example.jsonl").write_text("\n".join(records), encoding="utf-8")
    corpus = read(tmp_path / "example.jsonl")
    assert [question.id for question in corpus.questions] == ["q0001"]
    assert corpus.dialogues[0].turn("s1:1").images[0].caption == "a red bike"


def test_the_mapping_of_the_page_reads_the_json_of_the_page(tmp_path: Path) -> None:
    mapped(tmp_path)
    corpus = read(tmp_path / "official.json", str(tmp_path / "mapping.yaml"))
    [dialogue] = corpus.dialogues
    assert [(t.id, t.speaker, t.text) for t in dialogue.turns] == [("s1:T1", "Ana", "Look!"), ("s1:T2", "Ben", "Nice.")]
    assert [(image.index, image.caption) for image in dialogue.images] == [(0, "a red bike")]
    options = ("a car", "a bike")
    asked = Question("c1-q000", "c1", "What does Ana ride?", "single", options, ("B",), ("s1:T1",), split="test")
    assert corpus.questions == (asked,)


def test_every_format_of_the_table_is_one_that_is_read() -> None:
    lines = (ROOT / "docs" / "data.md").read_text(encoding="utf-8").splitlines()
    assert set(FORMATS) <= {match[1] for line in lines if (match := re.match(r"\| `(\w+)` \|", line))}


def test_the_readme_is_short_and_links_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    for page in PAGES[1:]:
        name = str(page.relative_to(ROOT))
        assert name in text or name in ("docs/index.md", "docs/reference.md"), f"README.md does not link {name}"
