"""Execute the notebooks in place and keep small outputs: `make notebooks`, or python notebooks/execute.py NAME.ipynb.

Warnings of libraries, times and paths of this machine are left out, and pictures get a palette of 256 colours.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path
from typing import Any

import nbformat

FOLDER = Path(__file__).parent


def execute(path: Path) -> None:
    """Run a notebook in its folder and write it with its outputs."""
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    metadata = dict(book.metadata)
    NotebookClient(book, timeout=1800, resources={"metadata": {"path": str(path.parent)}}).execute()
    book.metadata = metadata
    clean(book)
    nbformat.write(book, path)


def clean(book: Any) -> None:
    """Drop what differs from machine to machine, and shrink pictures."""
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type != "code":
            continue
        cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = output.text.replace(f"{FOLDER.resolve()}/", "")
            elif "image/png" in output.data:
                output.data["image/png"] = shrunk(output.data["image/png"])
                output.data["text/plain"] = "a picture"  # in place of an object's address


def shrunk(png: str) -> str:
    """A base64 picture with a palette."""
    from PIL import Image

    buffer = io.BytesIO()
    with Image.open(io.BytesIO(base64.b64decode(png))) as picture:
        picture.convert("RGB").quantize(256).save(buffer, format="PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(map(str, FOLDER.glob("*.ipynb"))):
        execute(Path(name))
