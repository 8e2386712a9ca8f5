"""`remind prompts`: the prompt templates as files to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from remind.core.errors import ConfigError
from remind.core.files import write_text
from remind.states.prompts import FOLDER, outline


@dataclass
class PromptsConfig:
    """Write the prompt templates to a folder, to change them there and pass it as --prompts to any command."""

    out: str
    """Folder for them; FIELDS.md in it says what each may use. Templates that you do not change can be deleted."""


def write_templates(cfg: PromptsConfig) -> None:
    """See `PromptsConfig`. Raises ConfigError for a folder that is not empty."""
    out = Path(cfg.out)
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"{out} is not empty; choose another out")
    out.mkdir(parents=True, exist_ok=True)
    rows = ["| template | fields |", "|---|---|"]
    for path in sorted(FOLDER.glob("*.j2")):
        text = path.read_text(encoding="utf-8")
        write_text(out / path.name, text)
        rows.append(f"| {path.name} | {', '.join(sorted(outline(text, path)[0])) or '-'} |")
    write_text(out / "FIELDS.md", "\n".join(rows) + "\n")
    print(f"{len(rows) - 2} templates: {out}")
