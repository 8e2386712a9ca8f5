"""The commands of the documents: README.md, docs/, comments of configs and notebooks.

A command runs `remind NAME`, `python -m MODULE`, or a file of scripts/ (with python or `accelerate launch`).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import dropwhile, takewhile
from pathlib import Path

from remind.commands import COMMANDS

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "results").glob("*.md"))]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))
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
    """A line to type, continuations joined, and its file and line."""

    place: str
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.text, comments=True))

    @property
    def split(self) -> tuple[str | None, tuple[str, ...]]:
        """A command of `remind` or the name of a module (None: another program), and what follows it."""
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
    def program(self) -> str | None:
        return self.split[0]

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.split[1]

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
    found: list[Block] = []
    prose: list[tuple[int, str]] = []
    lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    for number, line in lines:
        if line.startswith("```"):
            inside = tuple(text for _, text in takewhile(lambda item: item[1] != "```", lines))
            found.append(Block(str(path.relative_to(ROOT)), line[3:].strip(), number + 1, inside))
        else:
            prose.append((number, line))
    return found, prose


def _joined(lines: Iterable[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines with those they continue on after a backslash."""
    rest = iter(lines)
    for number, line in rest:
        whole = line.strip()
        while whole.endswith("\\"):
            whole = f"{whole[:-1].rstrip()} {next(rest)[1].strip()}"
        yield number, whole


def blocks(language: str) -> list[Block]:
    return [block for path in PAGES for block in _page(path)[0] if block.language == language]


def snippets() -> list[Block]:
    return blocks("python")


def block_commands(language: str = "bash") -> list[Command]:
    """Every line of every block, page by page in the order a reader types them."""
    return [
        Command(f"{block.page}:{number}", line)
        for block in blocks(language)
        for number, line in _joined(enumerate(block.lines, start=block.line))
        if line and not line.startswith("#")
    ]


def spans() -> list[Command]:
    """Everything in `backticks` outside the blocks."""
    return [
        Command(f"{path.relative_to(ROOT)}:{number}", span)
        for path in PAGES
        for number, line in _page(path)[1]
        for span in re.findall(r"`([^`]+)`", line)
    ]


def comments() -> list[Command]:
    """Lines of comments in configs; a comment goes on in a comment."""
    return [
        Command(f"{path.relative_to(ROOT)}:{number}", line)
        for path in CONFIGS
        for number, line in _joined(
            (number, line.strip().removeprefix("#"))
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
            if line.strip().startswith("#")
        )
    ]


def all_commands() -> list[Command]:
    """Of blocks, running text, tables, comments of configs and notebooks; a name alone only mentions one."""
    found = [*block_commands(), *block_commands("text"), *(span for span in spans() if _START.match(span.text))]
    found += [Command(one.place, one.text[m.start() :]) for one in comments() if (m := _START.search(one.text))]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        found += [Command(path.name, line) for line in re.findall(r"`(remind [a-z-]+ -[^`]+)`", text)]
    return [command for command in found if command.program and command.arguments]
