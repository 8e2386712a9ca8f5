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
#: What each must show: pictures, and HTML of text.
SHOWN = {
    "01_probe_sae_features": (3, 5),
    "02_grounding": (3, 2),
    "03_alignment": (3, 1),
    "04_from_dialogue_to_checkpoint": (1, 1),
    "05_what_did_alignment_change": (3, 1),
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
    _check_outputs(path.stem, book)
    assert all(code[0].source.count(name) == 1 for name in ON_NANO.get(path.stem, {}))
    imported = re.findall(r"^(?:from|import) (remind[\w.]*)", "\n".join(cell.source for cell in code), re.M)
    assert set(imported) <= {"remind", "remind.viewing"}


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Executes a notebook's cells in this process, in a folder of its own; returns it with outputs, and a value."""
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    # it puts a module of its own in the place of __main__
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.chdir(tmp_path)

    def run(path: Path, last: str = "None") -> tuple[Any, Any]:
        book = nbformat.read(path, as_version=4)
        shell = InteractiveShell(
            config=Config(HistoryManager={"enabled": False}), ipython_dir=str(tmp_path / "ipython")
        )
        code = [cell for cell in book.cells if cell.cell_type == "code"]
        for name, replacement in ON_NANO.get(path.stem, {}).items():
            code[0].source = code[0].source.replace(name, replacement)
        for cell in code:
            done = shell.run_cell(cell.source)
            done.raise_error()
            data = {} if done.result is None else shell.display_formatter.format(done.result)[0]
            cell.outputs = [nbformat.from_dict({"output_type": "execute_result", "data": data})] if data else []
        return book, shell.run_cell(last).result

    return run


def _outputs(book: Any, kind: str) -> list[str]:
    return [
        output.data[kind]
        for cell in book.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "execute_result" and kind in output.data
    ]


def _check_outputs(stem: str, book: Any, more: tuple[int, int] = (0, 0)) -> None:
    pictures, pages = (least + other for least, other in zip(SHOWN[stem], more, strict=True))
    assert len(_outputs(book, "image/png")) >= pictures
    assert len(_outputs(book, "text/html")) >= pages


@pytest.mark.slow
def test_probing(executed: Any) -> None:
    last = "[len(bench.layers), examples[LAYER].n_tokens, len(top_features(encoded, LAYER, span=span))]"
    book, (layers, tokens, features) = executed(BOOKS[0], last)
    # nano sees images: two tables of their features and a heat map
    _check_outputs("01_probe_sae_features", book, more=(1, 2))
    assert layers == 2
    assert tokens > 1000
    assert features > 0
    pages = _outputs(book, "text/html")
    assert any("poker" in page for page in pages)
    # replies as they are, steered and ablated
    assert sum("as it is" in page for page in pages) == 2


@pytest.mark.slow
def test_grounding(executed: Any) -> None:
    last = "[len(trace.state.blocks), [turn.id for turn in state.turns], carried]"
    book, (blocks, turns, carried) = executed(BOOKS[1], last)
    _check_outputs("02_grounding", book)
    assert blocks > 0
    assert carried
    page = _outputs(book, "text/html")[0]
    assert page.count("<p ") >= 17
    assert sum(f">{turn} " in page for turn in turns) == 16
    assert "[ATTENTION]" in _outputs(book, "text/html")[-1]


@pytest.mark.slow
def test_alignment_tells_the_run_that_learned_from_the_one_that_forgot(executed: Any) -> None:
    from remind.alignment.metrics import read_metrics

    book, folders = executed(BOOKS[2], "list(runs.values())")
    _check_outputs("03_alignment", book)
    anchored, drifting = (read_metrics(folder) for folder in folders)
    assert _accuracy(anchored)[-1] > _accuracy(anchored)[0]
    assert _accuracy(drifting)[-1] < _accuracy(anchored)[-1]
    for rows in (anchored, drifting):
        jsd = [row["jsd01"] for row in rows if row["kind"] == "train"]
        assert sum(jsd[-4:]) < sum(jsd[:4])


def _accuracy(rows: list[dict[str, Any]]) -> list[float]:
    return [row["x0"] for row in rows if row["kind"] == "accuracy"]


@pytest.mark.slow
def test_from_dialogue_to_checkpoint(executed: Any) -> None:
    book, model = executed(BOOKS[3], "model")
    _check_outputs("04_from_dialogue_to_checkpoint", book)
    assert (Path(model) / "config.json").is_file()
    assert (Path(model) / "model.safetensors").is_file()
    answers = _outputs(book, "text/plain")[-1]
    assert "What does Clara grow?" in answers
    assert answers.count("'after'") == 7


@pytest.mark.slow
def test_what_alignment_changed(executed: Any) -> None:
    last = (
        "[rises['changed'][2], rises['random'][2], ends, figures['salience']['attention']['3']['difference']['value']]"
    )
    book, (changed, random, ends, salience) = executed(BOOKS[4], last)
    _check_outputs("05_what_did_alignment_change", book)
    assert ends["before"] <= random < changed <= ends["residual stream"]
    assert salience > 0
