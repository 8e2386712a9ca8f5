"""Prompt templates as files in our own words, each with an id and a hash.

answer, strategy, reminder, summary: what a state is rendered with (Tables 9-11). ask_*, judge_*: what the auxiliary LLM
is asked, as blocks (4.2, 4.4, Figure 10). explain_*: how features of SAEs are named and their names scored. memory_*:
what memory systems ask, named after their stages.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

#: What states are rendered with, and what a chat model that helps to build them is asked with.
RENDERED = ("answer", "strategy", "reminder", "summary")
ASKED = ("ask_kind", "ask_cue", "ask_strategy", "ask_summary")

_FOLDER = Path(__file__).parent
# Prompts are plain text for a model, never a page: escaping would change the dialogue's characters.
_TEMPLATES = Environment(
    loader=FileSystemLoader(_FOLDER),
    undefined=StrictUndefined,
    autoescape=False,
    trim_blocks=True,
    lstrip_blocks=True,
    auto_reload=False,
)


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
    return hashlib.sha256((_FOLDER / f"{name}.j2").read_bytes()).hexdigest()[:12]


def prompt_id(name: str) -> str:
    """Name and hash of the template, as in `ask_cue-0123456789ab`."""
    return f"{name}-{fingerprint(name)}"
