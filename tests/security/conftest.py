"""A small model with SAEs that fit it, and dialogues full of hostile text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from in_process import run_module

from sae import TopKSAE, layer_folder

#: What must stay text wherever it is shown: it would mark the window, or ask for a file.
HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 2'> <svg onload=window.hacked=3> & \"quoted\"",
    "<!--<script> --> {{ 7 * 7 }} <link rel=stylesheet href=//example.org/x.css> \u2028 \u202egnp.exe\u202c",
    "<iframe src='https://example.org/'></iframe><style>@import url(//example.org/y.css)</style>",
)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-VL folder."""
    from remind.models.nano import save_nano

    return save_nano(tmp_path_factory.mktemp("model") / "tiny", hidden_size=32, layers=2, vision_size=16)


@pytest.fixture(scope="session")
def saes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SAEs that fit it."""
    folder = tmp_path_factory.mktemp("saes")
    TopKSAE(32, 64, 4, generator=torch.Generator().manual_seed(0)).save(layer_folder(folder, 1))
    return folder


def _hostile(path: Path) -> Path:
    """Two dialogues in which text, speakers, ids, captions, questions, options and answers are all hostile."""
    speakers, rows = ("Ana <b onclick=window.hacked=4>", HOSTILE[1]), []
    texts = [(n, f"{HOSTILE[n % 4]} We drank tea {n}.") for n in range(8)]
    images = [[{"path": None, "caption": HOSTILE[n % 4], "source": None}] if n < 3 else [] for n, _ in texts]
    turns = [{"id": f"t{n}", "speaker": speakers[n % 2], "text": text, "images": images[n]} for n, text in texts]
    for number in range(2):
        name = f"d{number} {HOSTILE[0]}"
        rows.append({"type": "context", "id": name, "sessions": [{"id": "s1", "time": HOSTILE[2], "turns": turns}]})
        common = {"type": "question", "context_id": name, "images": [], "category": HOSTILE[0], "time": None}
        common |= {"evidence": ["t1", "t4"], "dimension": None, "split": ("train", "test")[number]}
        said = {"format": "direct", "options": [], "answers": [HOSTILE[3]]}
        chosen = {"format": "single", "options": [*HOSTILE[:3], "tea"], "answers": ["D"]}
        rows.append({**common, **said, "id": f"q{number} {HOSTILE[1]}", "question": f"What of {HOSTILE[0]}?"})
        rows.append({**common, **chosen, "id": f"p{number}", "question": f"Which {HOSTILE[2]}?"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory, tiny: Path, saes: Path) -> Path:
    """A folder with such dialogues (data.jsonl) and their states (states)."""
    folder = tmp_path_factory.mktemp("hostile")
    words = ("--input", _hostile(folder / "data.jsonl"), "--out", folder / "states", "--cache", folder / "cache")
    assert run_module("remind", "build-states", *words, "--backbone", tiny, "--sae", saes)[0] == 0
    return folder
