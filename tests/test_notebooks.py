"""The notebooks run from top to bottom on the nano backbone, and are kept with the outputs of a run as they stand."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebooks need pip install 'remind-toolkit[notebooks]'")
pytest.importorskip("ipykernel", reason="the notebooks need pip install 'remind-toolkit[notebooks]'")

FOLDER = Path(__file__).parent.parent / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
#: Those that open on a real language model, and how their first lines of code are changed to run on nano in seconds.
ON_NANO = {
    "01_probe_sae_features": {'"smollm2"': '"nano"', '"swim"': '"poker"'},
    "02_grounding": {'"smollm2"': '"nano"', '"q0148"': '"test-0001-q01"'},
    "04_from_dialogue_to_checkpoint": {'"smollm2"': '"nano"'},
}
#: What each shows at the least, pictures and HTML of text, and what holds when it has run.
SHOWN = {
    "01_probe_sae_features": (
        (3, 5),
        "len(bench.layers) == 2 and examples[LAYER].n_tokens > 1000 and top_features(encoded, LAYER, span=span)"
        # replies as they are, steered and ablated
        " and 'poker' in pages and pages.count('as it is') > 1",
    ),
    "02_grounding": (
        (3, 2),
        "trace.state.blocks and carried and '[ATTENTION]' in pages"
        " and sum(f'>{turn.id} ' in pages for turn in state.turns) > 15",
    ),
    # the run that learned and the one that forgot
    "03_alignment": (
        (3, 1),
        "(one := accuracy(list(runs.values())[0]))[-1] > max(one[0], accuracy(list(runs.values())[1])[-1])",
    ),
    "04_from_dialogue_to_checkpoint": (
        (1, 1),
        "Path(model, 'model.safetensors').is_file() and texts.count(\"'after'\")",
    ),
    "05_what_did_alignment_change": (
        (2, 1),
        "(right := {name: [one['right'] for one in values] for name, values in rises.items()})"
        " and ends['before']['right'] <= right['random'][2] < right['changed'][2] <= ends['residual stream']['right']"
        " and figures['salience']['attention']['3']['difference']['value'] > 0",
    ),
}


@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_with_small_outputs(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert path.stat().st_size < 300_000
    assert {other.stem for other in BOOKS} == set(SHOWN)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    # pictures, tables and text: nothing that runs, no errors and no paths of the machine that ran it
    assert {output.output_type for output in outputs} <= {"execute_result", "display_data", "stream"}
    text = json.dumps(outputs)
    assert "<script" not in text.lower()
    assert "/home/" not in text
    assert str(FOLDER.parent) not in text
    _check_outputs(path.stem, code)
    assert all(code[0].source.count(name) == 1 for name in ON_NANO.get(path.stem, {}))
    imported = re.findall(r"^(?:from|import) (remind[\w.]*)", "\n".join(cell.source for cell in code), re.M)
    assert set(imported) <= {"remind", "remind.viewing"}


@pytest.mark.slow
@pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in this process, in a folder of its own."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    # it puts a module of its own in the place of __main__
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)
    shell = InteractiveShell(config=Config(HistoryManager={"enabled": False}), ipython_dir=str(tmp_path / "ipython"))
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    for name, replacement in ON_NANO.get(path.stem, {}).items():
        code[0].source = code[0].source.replace(name, replacement)
    for cell in code:
        done = shell.run_cell(cell.source)
        done.raise_error()
        data = {} if done.result is None else shell.display_formatter.format(done.result)[0]
        cell.outputs = [nbformat.from_dict({"output_type": "execute_result", "data": data})] if data else []
    _check_outputs(path.stem, code)
    pages, texts = ("\n".join(_outputs(code, kind)) for kind in ("text/html", "text/plain"))
    shell.user_ns |= {"pages": pages, "texts": texts, "accuracy": _accuracy, "Path": Path}
    held = shell.run_cell(SHOWN[path.stem][1])
    held.raise_error()
    assert held.result


def _accuracy(run: str) -> list[float]:
    from remind.alignment.metrics import read_metrics

    return [row["x0"] for row in read_metrics(run) if row["kind"] == "accuracy"]


def _outputs(code: list[Any], kind: str) -> list[str]:
    results = [output for cell in code for output in cell.outputs if output.output_type == "execute_result"]
    return [output.data[kind] for output in results if kind in output.data]


def _check_outputs(stem: str, code: list[Any]) -> None:
    pictures, pages = SHOWN[stem][0]
    assert len(_outputs(code, "image/png")) >= pictures
    assert len(_outputs(code, "text/html")) >= pages
