"""Prompt templates as files in our own words, each with an id and a hash.

answer, strategy, reminder, summary: what a state is rendered with (Tables 9-11). ask_*, judge_*: what the auxiliary LLM
is asked, as blocks (4.2, 4.4, Figure 10). explain_*: how features of SAEs are named and their names scored. memory_*:
what memory systems ask, named after their stages. A folder of one's own templates may take the place of any of them.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from jinja2 import FileSystemLoader, StrictUndefined, TemplateSyntaxError
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Block
from jinja2.sandbox import SandboxedEnvironment

from remind.core.errors import ConfigError

#: What states are rendered with, and what a chat model that helps to build them is asked with.
RENDERED = ("answer", "strategy", "reminder", "summary")
ASKED = ("ask_kind", "ask_cue", "ask_strategy", "ask_summary")

#: Of our templates.
FOLDER = Path(__file__).parent
#: Names the folder that `use` was given, for processes that are started later.
_VARIABLE = "REMIND_PROMPTS"
# Prompts are plain text for a model, never a page: escaping would change the dialogue's characters.
_TEMPLATES = SandboxedEnvironment(
    loader=FileSystemLoader(FOLDER),
    undefined=StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)


def use(folder: str | Path | None) -> None:
    """Take the templates of a folder in place of those of the same names, here and in processes started from now on.

    Args:
        folder: None: none but our own.

    Raises:
        ConfigError: no folder, none with templates, or one that is not of ours, is not Jinja, uses a field that is not
            ours, or lacks a block.
    """
    own = [] if folder is None else sorted(Path(folder).glob("*.j2"))
    if folder is not None and not own:
        raise ConfigError(f"{folder}: no templates (NAME.j2) in it; `remind prompts --out FOLDER` writes ours")
    for path in own:
        if not (FOLDER / path.name).is_file():
            raise ConfigError(f"{path}: there is no template of that name; `remind prompts` writes those there are")
        fields, blocks = outline(path.read_text(encoding="utf-8"), path)
        known, needed = outline((FOLDER / path.name).read_text(encoding="utf-8"), path)
        if unknown := sorted(fields - known):
            raise ConfigError(f"{path}: no field {unknown[0]!r}; there are {', '.join(sorted(known)) or 'none'}")
        if missing := sorted(needed - blocks):
            raise ConfigError(f"{path}: its block {missing[0]!r} is missing")
    os.environ.pop(_VARIABLE, None)
    if folder is not None:
        os.environ[_VARIABLE] = str(Path(folder).absolute())
    _TEMPLATES.loader = FileSystemLoader([*([] if folder is None else [folder]), FOLDER])
    if _TEMPLATES.cache is not None:
        _TEMPLATES.cache.clear()


def outline(text: str, path: Path) -> tuple[set[str], set[str]]:
    """The fields and the blocks of a template. Raises ConfigError."""
    try:
        tree = _TEMPLATES.parse(text)
    except TemplateSyntaxError as error:
        raise ConfigError(f"{path}:{error.lineno}: {error.message}") from None
    return find_undeclared_variables(tree), {block.name for block in tree.find_all(Block)}


def render(name: str, **values: Any) -> str:
    """Fill the template `<name>.j2`."""
    return _TEMPLATES.get_template(f"{name}.j2").render(**values)


def blocks(name: str, **values: Any) -> dict[str, str]:
    """Fill each block of the template `<name>.j2`: "system" and "user" of those that are messages to a chat model."""
    template = _TEMPLATES.get_template(f"{name}.j2")
    context = template.new_context(values)
    return {block: "".join(fill(context)).strip() for block, fill in template.blocks.items()}


def fingerprint(name: str) -> str:
    """Twelve hex digits of the template's SHA-256; goes into every artifact made with it."""
    path = _TEMPLATES.get_template(f"{name}.j2").filename
    return hashlib.sha256(Path(str(path)).read_bytes()).hexdigest()[:12]


def prompt_id(name: str) -> str:
    """Name and hash of the template, as in `ask_cue-0123456789ab`."""
    return f"{name}-{fingerprint(name)}"


if _VARIABLE in os.environ:
    use(os.environ[_VARIABLE])
