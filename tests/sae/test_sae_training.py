"""From dialogue files to a folder of SAEs."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from forked import ROOT, Forked
from small_corpus import rows

from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import write_rows
from remind.core.run_folder import as_dict
from remind.data.dialogue import Dialogue, Session, Turn
from remind.grounding.check import check_sae
from remind.models.nano import save_nano
from remind.train_sae import CheckSAEConfig, TrainSAEConfig, train_sae
from remind.train_sae.corpus import NAMES, read_corpus, with_names
from sae import TopKSAE, layer_folder, load_idf, load_layers
from sae.config import SAETrainConfig

TINY = SAETrainConfig(d_sae=256, k=8, steps=30, batch_size=256, lr=1e-3, log_every=10, init_tokens=1024)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainSAEConfig]:
    """A run with a buffer that the corpus does not fit into, so that it is harvested on the way."""
    folder = tmp_path_factory.mktemp("sae")
    write_rows(folder / "chat.jsonl", rows(24))
    common: dict[str, Any] = {"backbone": "nano", "layers": [4, 2], "window": 64, "held_out": 0.25}
    cfg = TrainSAEConfig(str(folder / "out"), str(folder / "chat.jsonl"), trainer=TINY, buffer_tokens=600, **common)
    assert train_sae(cfg) == folder / "out"
    return folder / "out", cfg


def test_the_folder_holds_everything(run: tuple[Path, TrainSAEConfig]) -> None:
    out, _ = run
    assert {path.name for path in out.iterdir()} >= {"config.yaml", "data.json", "metrics.jsonl", "report.json"}
    for layer, coder in load_layers(out).items():
        assert (coder.d_in, coder.d_sae, coder.k) == (128, 256, 8)
        record = json.loads((layer_folder(out, layer) / "training.json").read_text())
        assert (record["layer"], record["steps"], record["tokens"]) == (layer, 30, 30 * 256)
        assert record["turns"] == {"training": 108, "held_out": 36}
        assert set(record["loss_recovered"]) == {str(layer), "all"}
        assert coder.metadata["hook_name"] == {2: "blocks.2.hook_resid_pre", 4: "blocks.3.hook_resid_post"}[layer]
        # ln((1 + turns) / (1 + 0)), of features that never fire
        assert float(load_idf(layer_folder(out, layer)).max()) == pytest.approx(math.log(109))


def test_numbered_speakers_get_names_and_others_keep_theirs() -> None:
    def talk(*speakers: str) -> Dialogue:
        turns = [tuple(Turn(f"{s}:{n}", speaker, "hi") for n, speaker in enumerate(speakers * 2)) for s in (1, 2)]
        return Dialogue("d", tuple(Session(str(number), None, part) for number, part in enumerate(turns)))

    named = with_names(talk("Speaker 1", "Speaker 2", "Ana"), 0)
    first, second = ([turn.speaker for turn in session.turns] for session in named.sessions)
    assert first[:3] == first[3:] == [first[0], first[1], "Ana"]
    assert len({*first[:2]} & {*NAMES}) == 2
    assert first[:2] != second[:2]
    assert with_names(talk("Ana", "Dr. Who", "Speaker"), 0) == talk("Ana", "Dr. Who", "Speaker")


def test_whether_saes_fit_a_model(run: tuple[Path, TrainSAEConfig], tmp_path: Path) -> None:
    out, cfg = run
    same = {"backbone": "nano", "data": [str(cfg.data)], "window": 64, "limit": None}
    figures = check_sae(CheckSAEConfig(str(out), **same, out=str(tmp_path / "fit.json")))["layers"]
    assert 0 < figures["2"]["fvu"] < 1
    assert json.loads((tmp_path / "fit.json").read_text())["layers"] == figures
    # the same features read another layer: a copy that is said to read that one
    coder = TopKSAE.load(layer_folder(out, 4))
    coder.metadata = {}
    coder.save(layer_folder(tmp_path / "others", 0))
    other = check_sae(CheckSAEConfig(str(tmp_path / "others"), **same))["layers"]["0"]
    assert other["fvu"] > 1
    narrow = save_nano(tmp_path / "narrow", hidden_size=32, layers=4, vision_size=16)
    with pytest.raises(ModelError, match=r"reads hidden states of width 128, but those of .*narrow are 32 wide"):
        check_sae(CheckSAEConfig(str(out), str(narrow)))


def test_what_is_held_out_has_its_images_too(tmp_path: Path) -> None:
    (tmp_path / "imgs").mkdir()
    (tmp_path / "imgs" / "a.png").write_bytes(b"x")
    for name, url in (
        ("train", "https://e.org/a.png"),
        ("own", "https://e.org/x/a.jpg"),
        ("none", "https://e.org/b.png"),
    ):
        said = {"speaker": "Ana", "text": name, "images": [{"url": url, "caption": "a boat"}]}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"id": name, "messages": [said]}))
    for name, shown in (("own", True), ("none", False)):
        cfg = TrainSAEConfig(data=str(tmp_path / "train.jsonl"), out="", images=str(tmp_path / "imgs"))
        _, held_out = read_corpus(replace(cfg, evaluate_on=[str(tmp_path / f"{name}.jsonl")]))
        assert [bool(image.path) for one in held_out for image in one.images] == [shown]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layers": [9]}, ModelError, r"layer 9 does not exist: .* layers 0 \(embeddings\) to 4"),
        ({"data": "none.jsonl"}, DataError, "none.jsonl"),
        ({"trackers": ["paper"]}, ConfigError, "no tracker paper"),
        ({"evaluate_on": ["copy.jsonl"]}, DataError, r"copy\.jsonl is trained on and cannot be evaluated on"),
    ],
)
def test_failures_leave_nothing(run, tmp_path, changes, error, message, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(str(run[1].data), copy := tmp_path / "copy.jsonl")
    with pytest.raises(error, match=message):
        train_sae(replace(run[1], out=str(tmp_path / "new"), **changes))
    assert list(tmp_path.iterdir()) == [copy]


def same_saes(one: Path, other: Path) -> bool:
    names = ("sae_weights.safetensors", "cfg.json", "idf.safetensors")
    files = ["metrics.jsonl", *(f"layer_0{layer}/{name}" for layer in (2, 4) for name in names)]
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def script(cfg: TrainSAEConfig, folder: Path) -> Forked:
    """`remind train-sae` in a process of its own."""
    (folder / "config.yaml").write_text(yaml.safe_dump(as_dict(cfg)))
    return Forked(ROOT / "scripts" / "train_sae.py", "--config", folder / "config.yaml")


@pytest.mark.slow
def test_stopped_and_killed_runs_end_with_the_same_bits(run: tuple[Path, TrainSAEConfig], tmp_path: Path) -> None:
    whole, cfg = run
    cfg = replace(cfg, out=str(tmp_path / "out"), checkpoint_every=2, resume=True)

    def checkpoints() -> set[str]:
        return {path.name for path in (tmp_path / "out").glob("checkpoint-*")}

    for number in (signal.SIGTERM, *[signal.SIGKILL] * int(os.environ.get("REMIND_KILLS", "1"))):
        before, process = checkpoints(), script(cfg, tmp_path)
        # once it trains: anywhere between two checkpoints, or while one is written
        while process.poll() is None and checkpoints() == before:
            time.sleep(0.005)
        time.sleep(random.uniform(0, 0.1))
        process.send_signal(number)
        _, errors = process.communicate()
        assert ("stopped by SIGTERM at step" in errors) == (process.returncode == 128 + signal.SIGTERM)
    for changes, message in (({"resume": False}, "already holds a run"), ({"window": 32}, r"other settings \(window")):
        with pytest.raises(ConfigError, match=message):
            train_sae(replace(cfg, **changes))
    process = script(cfg, tmp_path)
    _, errors = process.communicate(timeout=200)
    assert process.returncode == 0, errors[-2000:]
    assert same_saes(tmp_path / "out", whole)
