"""The commands of the documents: README.md, docs/, comments of configs and notebooks.

A command runs `remind NAME`, `python -m MODULE`, or a file of scripts/ (with python or `accelerate launch`). In bash
blocks and in running text it is executed by a test; in text blocks, of what takes GPUs or days, and in a row of a
table, where it says how a figure was measured, it is only parsed.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path

from remind.commands import COMMANDS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "results").glob("*.md"))]
CONFIGS = ROOT / "configs"
#: Where a command starts in running text, with a variable before it where it needs one.
_START = re.compile(
    r"(?:[A-Z_]+=\S+ )?(?:remind |python (?:-m )?|accelerate launch |make |pip install |jupyter |pytest )"
)
#: scripts/NAME.py → the command it wraps.
WRAPPED = {
    path.name: match[1]
    for path in sorted((ROOT / "scripts").glob("*.py"))
    if (match := re.search(r'run\("([\w-]+)"\)', path.read_text(encoding="utf-8")))
}


@dataclass(frozen=True)
class Command:
    """A line to type.

    Attributes:
        place: file and line.
        text: the line, continuations joined.
    """

    place: str
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.text, comments=True))

    @property
    def program(self) -> str | None:
        """A command of `remind` or the name of a module; None: another program."""
        return self._split()[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows the program."""
        return self._split()[1]

    def _split(self) -> tuple[str | None, tuple[str, ...]]:
        words = tuple(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), self.words))
        if words[:1] == ("remind",) and words[1:2] and words[1] in COMMANDS:
            return words[1], words[2:]
        if words[:2] == ("python", "-m") and not words[2].startswith(("pip", "pytest")):
            return words[2], words[3:]
        for place, word in enumerate(words):
            if word.startswith("scripts/"):
                return WRAPPED[Path(word).name], words[place + 1 :]
        return None, words[1:]

    @property
    def config(self) -> str | None:
        return self.option("--config")

    def option(self, name: str) -> str | None:
        words = self.words
        return next((words[n + 1] for n, word in enumerate(words[:-1]) if word == name), None)

    def __str__(self) -> str:
        return f"{self.place} {self.text}"


@dataclass(frozen=True)
class Block:
    """A fenced block: page, language, lines, and the number of its first line."""

    page: str
    language: str
    line: int
    lines: tuple[str, ...]


@cache
def _page(path: Path) -> tuple[list[Block], list[tuple[int, str]]]:
    """The fenced blocks of a page, and its other lines as (number, line)."""
    blocks: list[Block] = []
    prose: list[tuple[int, str]] = []
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    for number, line in lines:
        if line.startswith("```"):
            inside = tuple(text for _, text in takewhile(lambda item: item[1] != "```", lines))
            blocks.append(Block(str(path.relative_to(ROOT)), line[3:].strip(), number + 1, inside))
        else:
            prose.append((number, line))
    return blocks, prose


def _joined(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines with those they continue on after a backslash."""
    for number, line in lines:
        whole = line.strip()
        while whole.endswith("\\"):
            whole = f"{whole[:-1].rstrip()} {next(lines)[1].strip()}"
        yield number, whole


def blocks(language: str) -> list[Block]:
    return [block for path in PAGES for block in _page(path)[0] if block.language == language]


def block_commands(language: str = "bash") -> list[Command]:
    """Every line of every block, page by page in the order a reader types them."""
    return [
        Command(f"{block.page}:{number}", line)
        for block in blocks(language)
        for number, line in _joined(iter(enumerate(block.lines, start=block.line)))
        if line and not line.startswith("#")
    ]


def spans(in_tables: bool | None = None) -> list[Command]:
    """Everything in `backticks` outside the blocks; with `in_tables` only inside or outside tables."""
    return [
        Command(f"{path.relative_to(ROOT)}:{number}", span)
        for path in PAGES
        for number, line in _page(path)[1]
        if in_tables is None or line.startswith("|") == in_tables
        for span in re.findall(r"`([^`]+)`", line)
    ]


def span_commands() -> list[Command]:
    """Whole commands in running text; a name without arguments (`remind export`) only mentions one."""
    return [span for span in spans(in_tables=False) if _START.match(span.text) and span.program and span.arguments]


def table_commands() -> list[Command]:
    """What tables of measurements say was run, and text blocks."""
    large = [command for command in block_commands("text") if command.program]
    return large + [span for span in spans(in_tables=True) if _START.match(span.text) and span.program]


def page_commands() -> list[Command]:
    """Commands of blocks and running text that a test can run."""
    return [command for command in (*block_commands(), *span_commands()) if command.program]


def comment_commands() -> list[Command]:
    """Commands in the comments of configs, from where they start to the end of the line."""
    commands = []
    for path in sorted(CONFIGS.rglob("*.yaml")):
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        # a comment goes on in a comment
        bare = ((number, line.strip().removeprefix("#")) for number, line in lines if line.strip().startswith("#"))
        for number, line in _joined(bare):
            if match := _START.search(line):
                command = Command(f"{path.relative_to(ROOT)}:{number}", line[match.start() :])
                commands += [command] if command.program and command.arguments else []
    return commands


def notebook_commands() -> list[Command]:
    """Commands in the text of notebooks."""
    return [
        Command(path.name, text)
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "markdown"
        for text in re.findall(r"`(remind [a-z-]+ -[^`]+)`", "".join(cell["source"]))
    ]


def snippets() -> list[Block]:
    return blocks("python")
