"""The commands of the documents: README.md, docs/, comments of configs and notebooks.

A command runs `remind NAME`, `python -m MODULE`, or a file of scripts/ (with python or `accelerate launch`).
"""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile
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


_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Command:
    """A line to type, continuations joined, and the page it stands on."""

    page: str
    text: str

    @cached_property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)

    @cached_property
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
        return self.words[self.words.index(name) + 1] if name in self.words[:-1] else None

    def __str__(self) -> str:
        return f"{self.page} {self.text}"


@dataclass(frozen=True)
class Block:
    """The lines of a fenced block, its page and its number among the page's blocks."""

    page: str
    number: int
    lines: tuple[str, ...]


def _text(path: Path) -> str:
    """A file in which no line goes on after a backslash; a comment goes on in a comment."""
    return re.sub(r" *\\\n[ #]*", " ", path.read_text(encoding="utf-8"))


def blocks(language: str) -> list[Block]:
    return [
        Block(str(path.relative_to(ROOT)), number, tuple(match[2].splitlines()))
        for path in PAGES
        for number, match in enumerate(_BLOCK.finditer(_text(path)), start=1)
        if match[1] == language
    ]


def snippets() -> list[Block]:
    return blocks("python")


def block_commands(language: str = "bash") -> list[Command]:
    """Every line of every block, page by page in the order a reader types them."""
    return [
        Command(block.page, line)
        for block in blocks(language)
        for line in block.lines
        if line and not line.startswith("#")
    ]


def spans() -> list[Command]:
    """Everything in `backticks` outside the blocks."""
    return [
        Command(str(path.relative_to(ROOT)), span)
        for path in PAGES
        for span in re.findall(r"`([^`\n]+)`", _BLOCK.sub("", _text(path)))
    ]


def all_commands() -> list[Command]:
    """Of blocks, running text, tables, comments of configs and notebooks, each once a page; a name alone is none."""
    found = [*block_commands(), *block_commands("text"), *(span for span in spans() if _START.match(span.text))]
    for path in CONFIGS:
        comments = re.findall(r"^ *#(.*)", _text(path), re.MULTILINE)
        found += [Command(path.name, line[m.start() :]) for line in comments if (m := _START.search(line))]
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        found += [Command(path.name, line) for line in re.findall(r"`(remind [a-z-]+ -[^`]+)`", text)]
    return [command for command in dict.fromkeys(found) if command.program and command.arguments]
