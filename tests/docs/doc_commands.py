"""What the documents tell a reader to type, read from README.md, the comments of configs/*.yaml, and docstrings."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONFIGS = ROOT / "configs"
#: What starts a command in running text, with a variable before it where it needs one.
_START = re.compile(r"(?:[A-Z_]+=\S+ )?(?:python(?: -m)? |accelerate launch |make |pip install |jupyter |pytest )")
_LAUNCHED = re.compile(r"(?:[A-Z_]+=\S+ )?(?:python (?=scripts/)|accelerate launch (?=-))")


@dataclass(frozen=True)
class Command:
    """A line to type.

    Attributes:
        place: file and line.
        section: heading it stands under, or the file's name.
        text: the line, continuations joined.
    """

    place: str
    section: str
    text: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(shlex.split(self.text, comments=True))

    @property
    def script(self) -> str | None:
        """File name of the script it runs."""
        return next((Path(word).name for word in self.words if word.startswith("scripts/")), None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """What follows the script."""
        at = next(n for n, word in enumerate(self.words) if word.startswith("scripts/"))
        return self.words[at + 1 :]

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
    """A fenced block: language, lines, and where its first line stands."""

    section: str
    language: str
    line: int
    lines: tuple[str, ...]


@cache
def _readme() -> tuple[tuple[Block, ...], tuple[tuple[int, str, str], ...]]:
    """Fenced blocks, and the other lines as (number, section, line)."""
    blocks: list[Block] = []
    prose: list[tuple[int, str, str]] = []
    section, language, start, inside = "", None, 0, []  # type: ignore[var-annotated]
    for number, line in enumerate(README.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if language is None:
                language, start, inside = line[3:].strip(), number + 1, []
            else:
                blocks.append(Block(section, language, start, tuple(inside)))
                language = None
        elif language is not None:
            inside.append(line)
        else:
            section = line[3:].strip() if line.startswith("## ") else section
            prose.append((number, section, line))
    assert language is None, f"README.md:{start}: a fence is not closed"
    return tuple(blocks), tuple(prose)


def _joined(lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    """Lines with those they go on to after a backslash."""
    for number, line in lines:
        whole = line.strip()
        while whole.endswith("\\"):
            whole = f"{whole[:-1].rstrip()} {next(lines)[1].strip()}"
        yield number, whole


def blocks(language: str) -> list[Block]:
    return [block for block in _readme()[0] if block.language == language]


def block_commands() -> list[Command]:
    """Every line of every ```bash block, in the order a reader types them."""
    found = []
    for block in blocks("bash"):
        for number, line in _joined(iter(enumerate(block.lines, start=block.line))):
            if line and not line.startswith("#"):
                found.append(Command(f"README.md:{number}", block.section, line))
    return found


def spans() -> list[Command]:
    """Everything in `backticks` outside the blocks."""
    return [
        Command(f"README.md:{number}", section, span)
        for number, section, line in _readme()[1]
        for span in re.findall(r"`([^`]+)`", line)
    ]


def span_commands() -> list[Command]:
    """Whole commands in running text and tables."""
    return [span for span in spans() if _START.match(span.text)]


def table_commands() -> list[Command]:
    """`script.py --with options`, as the table of measurements names what was run."""
    return [span for span in spans() if re.match(r"\w+\.py(?: |$)", span.text)]


def comment_commands() -> list[Command]:
    """Commands in the comments of configs, from where they start to the end of the line."""
    found = []
    for path in sorted(CONFIGS.rglob("*.yaml")):
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        # a comment goes on in a comment
        bare = ((number, line.strip().removeprefix("#")) for number, line in lines if line.strip().startswith("#"))
        found += _launches(_joined(bare), str(path.relative_to(ROOT)), path.stem)
    return found


def docstring_commands() -> list[Command]:
    """Commands in docstrings of the packages and scripts."""
    found = []
    for folder in ("remind", "sae", "scripts", "experiments", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            if "scripts/" not in source:
                continue
            tree = ast.parse(source)
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            for node in ast.walk(tree):
                text = ast.get_docstring(node) if isinstance(node, documented) else None
                lines = _joined(iter(enumerate((text or "").splitlines(), start=getattr(node, "lineno", 1))))
                found += _launches(lines, str(path.relative_to(ROOT)), path.stem)
    return found


def _launches(lines: Iterator[tuple[int, str]], file: str, section: str) -> Iterator[Command]:
    for number, line in lines:
        match = _LAUNCHED.search(line)
        if match and "scripts/" in line:
            yield Command(f"{file}:{number}", section, line[match.start() :].strip().strip("`"))


def notebook_commands() -> list[Command]:
    """Commands that stand in the words of notebooks."""
    found = []
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if cell["cell_type"] == "markdown":
                for text in re.findall(r"`(python scripts/[^`]+)`", "".join(cell["source"])):
                    found.append(Command(path.name, path.stem, text))
    return found


#: Sections whose commands a reader runs first; the others are run on what these leave.
_FIRST = ("Looking inside", "Your own dialogues, step by step", "Sparse autoencoders")


def readme_commands() -> list[Command]:
    """Commands of blocks and of the text that run a script."""
    return [command for command in (*block_commands(), *span_commands()) if command.script]


def first_part() -> list[Command]:
    return [command for command in readme_commands() if command.section in _FIRST]


def rest() -> list[Command]:
    return [command for command in readme_commands() if command.section not in _FIRST]


def runnable() -> list[Command]:
    """Every command that is run."""
    return [*readme_commands(), *comment_commands(), *docstring_commands()]


def snippets() -> list[Block]:
    return blocks("python")
