"""From dialogue files to a folder of SAEs, on the bundled small talk and on real dialogues."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from remind.alignment.run_folder import as_dict
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.progress import ProgressBar
from remind.data.dialogue import Dialogue, Image, Session, Turn
from remind.models.backbone import Backbone
from remind.models.load import load_backbone
from remind.models.windows import batches, make_windows, mixed, prompt_lines, window_size
from remind.train_sae import TrainSAEConfig, quick_sae, train_sae
from remind.train_sae.config import default_layers
from remind.train_sae.corpus import NAMES, read_dialogues, split_dialogues, with_names
from remind.train_sae.run import Harvester
from sae import DocumentFrequency, TopKSAE, layer_folder, load_idf, load_layers
from sae.trainer import SAETrainConfig

TINY = SAETrainConfig(d_sae=256, k=8, steps=30, batch_size=256, lr=1e-3, log_every=10, init_tokens=1024)


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano")


def write_chat(path: Path, n_dialogues: int = 6, turns: int = 12) -> Path:
    """Dialogues in the toolkit's own format."""
    words = ("tea", "river", "piano", "winter", "bread", "garden", "train", "letter")
    records = []
    for d in range(n_dialogues):
        lines = [
            {
                "id": f"s{s}:{t}",
                "speaker": ("Ana", "Ben")[t % 2],
                "text": " ".join(words[(d * 5 + s * 3 + t * i) % 8] for i in range(1, 9)),
                "time": None,
                "images": [],
            }
            for s in (1, 2)
            for t in range(turns)
        ]
        sessions = [
            {"id": f"s{s}", "time": None, "turns": [line for line in lines if line["id"].startswith(f"s{s}:")]}
            for s in (1, 2)
        ]
        records.append({"type": "context", "id": f"c{d}", "sessions": sessions})
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainSAEConfig]:
    folder = tmp_path_factory.mktemp("sae")
    data = write_chat(folder / "chat.jsonl")
    cfg = TrainSAEConfig(
        out=str(folder / "out"), data=str(data), backbone="nano", layers=[4, 2], window=64, trainer=TINY, held_out=0.3
    )
    assert train_sae(cfg) == folder / "out"
    return folder / "out", cfg


def test_the_folder_holds_everything(run: tuple[Path, TrainSAEConfig], nano: Backbone) -> None:
    out, _ = run
    assert sorted(p.name for p in out.iterdir()) == ["layer_02", "layer_04", "metrics.jsonl"]
    coders = load_layers(out)
    assert list(coders) == [2, 4]
    for layer, coder in coders.items():
        assert (coder.d_in, coder.d_sae, coder.k) == (nano.hidden_size, 256, 8)
        record = json.loads((layer_folder(out, layer) / "training.json").read_text())
        assert record["layer"] == layer
        assert list(record["data"]) == ["chat.jsonl"]
        assert (record["steps"], record["tokens"]) == (30, 30 * 256)
        assert record["dialogues"] == {"training": 4, "held_out": 2}
        assert record["turns"] == {"training": 96, "held_out": 48}
        assert 0 < record["held_out"]["fvu"] < 1
        assert record["harvest"]["kept"] > 0
    assert coders[2].metadata["hook_name"] == "blocks.2.hook_resid_pre"
    assert coders[4].metadata["hook_name"] == "blocks.3.hook_resid_post"


def test_held_out_fvu_is_that_of_the_saved_coder(run: tuple[Path, TrainSAEConfig], nano: Backbone) -> None:
    out, cfg = run
    dialogues = read_dialogues([Path(str(cfg.data))], cfg)
    _, held_out = split_dialogues(dialogues, cfg.held_out, cfg.trainer.seed)
    parts = []
    for window in make_windows(nano, held_out, 64, "test"):
        parts.append(nano.hidden_states(torch.tensor([window.ids]), None, [2])[2][0])
    h = torch.cat(parts).double()
    coder = TopKSAE.load(layer_folder(out, 2)).double()
    fvu = float((coder(h) - h).square().sum() / (h - h.mean(0)).square().sum())
    record = json.loads((layer_folder(out, 2) / "training.json").read_text())
    assert record["held_out"]["tokens"] == len(h)
    assert record["held_out"]["fvu"] == pytest.approx(fvu, rel=1e-3)


def test_idf_counts_training_turns(run: tuple[Path, TrainSAEConfig], nano: Backbone) -> None:
    out, cfg = run
    training, _ = split_dialogues(read_dialogues([Path(str(cfg.data))], cfg), cfg.held_out, cfg.trainer.seed)
    coder = TopKSAE.load(layer_folder(out, 4))
    seen: dict[int, set[int]] = {}
    for window in make_windows(nano, training, 64, "test"):
        codes = coder.encode(nano.hidden_states(torch.tensor([window.ids]), None, [4])[4][0])
        for t, turn in enumerate(window.turns):
            seen.setdefault(turn, set()).update(codes.indices[t][codes.active()[t]].tolist())
    expected = torch.tensor([math.log((1 + 96) / (1 + sum(j in s for s in seen.values()))) for j in range(256)])
    assert len(seen) == 96
    idf = load_idf(layer_folder(out, 4))
    assert idf is not None
    # a padded batch may round a value to the other side of zero or of the last place
    assert float((idf - expected).abs().mean()) < 1e-3


def test_an_existing_folder_is_kept_and_failures_leave_nothing(
    run: tuple[Path, TrainSAEConfig], tmp_path: Path
) -> None:
    out, cfg = run
    with pytest.raises(ConfigError, match="overwrite"):
        train_sae(cfg)
    assert load_layers(out)
    elsewhere = {**vars(cfg), "out": str(tmp_path / "new")}
    with pytest.raises(ModelError, match=r"layer 9 does not exist: .* layers 0 \(embeddings\) to 4"):
        train_sae(TrainSAEConfig(**{**elsewhere, "layers": [9]}))
    with pytest.raises(DataError):
        train_sae(TrainSAEConfig(**{**elsewhere, "data": str(tmp_path / "none.jsonl")}))
    few = TrainSAEConfig(**{**elsewhere, "trainer": SAETrainConfig(steps=2, batch_size=500_000)})
    with pytest.raises(ModelError, match="too few for one batch"):
        train_sae(few)
    with pytest.raises(ConfigError, match="takes 32768 tokens"):
        train_sae(TrainSAEConfig(**{**elsewhere, "window": 40_000}))
    assert list(tmp_path.iterdir()) == []


def dialogue() -> Dialogue:
    def turns(session: int, n: int) -> tuple[Turn, ...]:
        return tuple(Turn(f"{session}:{t}", "Ana", "word " * (3 * t + 1)) for t in range(n))

    pictured = Turn("3:0", "Ben", "look", images=(Image(0, caption="a red\nboat"), Image(1)))
    return Dialogue(
        "d", (Session("a", None, turns(1, 9)), Session("b", None, turns(2, 1)), Session("c", None, (pictured,)))
    )


def test_windows_hold_each_token_once_and_respect_sessions(nano: Backbone) -> None:
    windows = make_windows(nano, [dialogue(), dialogue()], 32, "test")
    expected: list[int] = []
    numbers: list[int] = []
    for number, turn in enumerate([*dialogue().turns, *dialogue().turns]):
        ids = nano.tokenize(prompt_lines(turn)).ids
        expected += ids
        numbers += [number] * len(ids)
    assert [i for window in windows for i in window.ids] == expected
    assert [i for window in windows for i in window.turns] == numbers
    assert all(1 <= len(window.ids) <= 32 for window in windows)
    session = [0] * 9 + [1] + [2] + [3] * 9 + [4] + [5]
    assert all(len({session[turn] for turn in window.turns}) == 1 for window in windows)


def test_a_turn_reads_as_in_a_prompt() -> None:
    assert prompt_lines(dialogue().turn("3:0")) == "Ben: look\n[Image #0 Caption] a red boat\n"


def test_batches_frame_and_pad(nano: Backbone) -> None:
    minilm = load_backbone("minilm")
    for backbone, frame in ((nano, ([], [])), (minilm, ([101], [102]))):
        windows = make_windows(backbone, [dialogue()], 20, "test")
        count = 0
        for inputs, turns in batches(backbone, windows, 3):
            for row, window in enumerate(windows[count : count + 3]):
                whole = [*frame[0], *window.ids, *frame[1]]
                real = inputs["attention_mask"][row].bool()
                assert inputs["input_ids"][row][real].tolist() == whole
                assert real.tolist() == sorted(real.tolist(), reverse=True)
                assert turns[row][turns[row] >= 0].tolist() == list(window.turns)
            count += len(inputs["input_ids"])
        assert count == len(windows)
    assert window_size(minilm, None) == 256
    assert window_size(minilm, 510) == 510
    with pytest.raises(ConfigError, match="takes 510 tokens"):
        window_size(minilm, 511)


def test_windows_for_training_are_the_same_in_another_order(nano: Backbone) -> None:
    windows = make_windows(nano, [dialogue()] * 4, 16, "test")
    order = mixed(windows, 2, 0)
    assert order != windows
    assert Counter(order) == Counter(windows)
    assert mixed(windows, 2, 0) == order


def test_the_split_is_by_dialogue_and_the_limit_counts_turns(tmp_path: Path) -> None:
    path = write_chat(tmp_path / "chat.jsonl", n_dialogues=10)
    cfg = TrainSAEConfig(out="", limit=100)
    dialogues = read_dialogues([path], cfg)
    assert len(dialogues) == 5
    training, held_out = split_dialogues(dialogues, 0.1, 0)
    assert (len(training), len(held_out)) == (4, 1)
    assert {d.id for d in training} | {d.id for d in held_out} == {d.id for d in dialogues}
    assert split_dialogues(dialogues[:1], 0.5, 0) == (dialogues[:1], [])
    assert split_dialogues(dialogues, 0.0, 0)[1] == []


def test_numbered_speakers_get_names_and_others_keep_theirs() -> None:
    def talk(*speakers: str) -> Dialogue:
        turns = [tuple(Turn(f"{s}:{n}", speaker, "hi") for n, speaker in enumerate(speakers * 2)) for s in (1, 2)]
        return Dialogue("d", tuple(Session(str(number), None, part) for number, part in enumerate(turns)))

    named = with_names(talk("Speaker 1", "Speaker 2", "Ana"), 0)
    first, second = ([turn.speaker for turn in session.turns] for session in named.sessions)
    assert first[:3] == first[3:]
    assert len(set(first)) == 3
    assert first[2] == "Ana"
    assert set(first[:2]) <= set(NAMES)
    assert first[:2] != second[:2]
    assert with_names(talk("Speaker 1", "Speaker 2", "Ana"), 0) == named
    assert with_names(talk("Ana", "Dr. Who", "Speaker"), 0) == talk("Ana", "Dr. Who", "Speaker")
    crowd = [f"user_{number}" for number in range(len(NAMES) + 5)]
    assert len({turn.speaker for turn in with_names(talk(*crowd), 0).sessions[0].turns}) == len(crowd)


def test_default_layers() -> None:
    assert default_layers(36) == [7, 14, 22, 29]
    assert default_layers(6) == [1, 2, 4, 5]
    assert default_layers(4) == [1, 2, 3]
    assert default_layers(1) == [1]


def test_held_out_dialogues_may_be_files_of_their_own(run: tuple[Path, TrainSAEConfig], tmp_path: Path) -> None:
    _, cfg = run
    other = write_chat(tmp_path / "other.jsonl", n_dialogues=3, turns=5)
    settings = {**vars(cfg), "out": str(tmp_path / "out"), "layers": [2]}
    train_sae(TrainSAEConfig(**{**settings, "evaluate_on": [str(other)]}))
    record = json.loads((layer_folder(tmp_path / "out", 2) / "training.json").read_text())
    assert record["dialogues"] == {"training": 6, "held_out": 3}
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(Path(str(cfg.data)).read_bytes())
    with pytest.raises(DataError, match=r"copy\.jsonl is trained on and cannot be evaluated on"):
        train_sae(TrainSAEConfig(**{**settings, "out": str(tmp_path / "no"), "evaluate_on": [str(copy)]}))


def test_loss_recovered_is_measured_where_there_is_a_head(run: tuple[Path, TrainSAEConfig]) -> None:
    record = json.loads((layer_folder(run[0], 4) / "training.json").read_text())
    assert set(record["loss_recovered"]) == {"4", "all"}
    assert record["loss_recovered"]["4"]["tokens"] > 100
    assert record["loss_recovered"]["4"]["ce_spliced"] > 0
    assert record["held_out"]["text"]["tokens"] == record["held_out"]["tokens"]
    assert record["held_out"]["visual"] is None
    histogram = record["held_out"]["density_histogram"]
    assert sum(histogram["counts"]) + histogram["never"] == 256


class Stopped(Exception):
    pass


@pytest.fixture
def stop_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    def stop(step: int | None) -> None:
        def advance(self: Any, done: int, note: str = "") -> None:
            if done == step:
                raise Stopped

        monkeypatch.setattr("remind.core.progress.ProgressBar.advance_to", advance)

    return stop


def test_the_eta_counts_from_the_first_step_and_filling_is_shown(
    run: tuple[Path, TrainSAEConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    starts: list[float] = []
    filled: list[float] = []
    monkeypatch.delenv("REMIND_QUIET", raising=False)
    step, advance_to, harvest = ProgressBar.step, ProgressBar.advance_to, Harvester.__call__

    def noted(self: Any, n: float = 1, note: str = "") -> None:
        notes.append(note)
        step(self, n, note)

    def advanced(self: Any, done: float, note: str = "") -> None:
        if done == 1 and self._bar.desc.startswith("train"):
            starts.append(self._bar.start_t)
        advance_to(self, done, note)

    def slow(self: Harvester, start: int = 0) -> Any:
        time.sleep(0.3)
        filled.append(time.time())
        return harvest(self, start)

    monkeypatch.setattr(ProgressBar, "step", noted)
    monkeypatch.setattr(ProgressBar, "advance_to", advanced)
    monkeypatch.setattr(Harvester, "__call__", slow)
    trainer = SAETrainConfig(**{**vars(TINY), "steps": 2, "init_tokens": 256})
    settings = {**vars(run[1]), "out": str(tmp_path / "out"), "buffer_tokens": 600, "trainer": trainer}
    train_sae(TrainSAEConfig(**settings))
    assert "filling the activation buffer: 600 of 600 tokens" in notes
    # the first pass over the data does not count
    assert starts[0] >= filled[0]


@pytest.mark.parametrize("cached", [False, True])
def test_an_interrupted_run_is_gone_on_with(
    run: tuple[Path, TrainSAEConfig], tmp_path: Path, stop_at: Any, cached: bool
) -> None:
    _, cfg = run
    # a buffer that the corpus does not fit into, so that it is harvested on the way
    settings = {**vars(cfg), "out": str(tmp_path / "out"), "checkpoint_every": 10, "buffer_tokens": 600}
    settings["cache"] = str(tmp_path / "cache") if cached else None
    train_sae(TrainSAEConfig(**{**settings, "out": str(tmp_path / "whole"), "cache": None}))
    stop_at(17)
    with pytest.raises(Stopped):
        train_sae(TrainSAEConfig(**settings))
    assert not (tmp_path / "out").exists()
    stop_at(None)
    with pytest.raises(ConfigError, match="holds an interrupted run; set resume"):
        train_sae(TrainSAEConfig(**settings))
    with pytest.raises(ConfigError, match=r"another config\.window, which a resume must keep"):
        train_sae(TrainSAEConfig(**{**settings, "resume": True, "window": 32}))
    train_sae(TrainSAEConfig(**{**settings, "resume": True}))
    names = [
        "metrics.jsonl",
        *(
            f"layer_0{layer}/{kind}"
            for layer in (2, 4)
            for kind in ("sae_weights.safetensors", "cfg.json", "idf.safetensors")
        ),
    ]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    if not cached:
        records = [json.loads((tmp_path / n / "layer_02" / "training.json").read_text()) for n in ("out", "whole")]
        assert records[0]["harvest"] == records[1]["harvest"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["out", "whole", *(["cache"] if cached else [])])


def test_a_run_that_failed_before_its_first_checkpoint_leaves_nothing(
    run: tuple[Path, TrainSAEConfig], tmp_path: Path, stop_at: Any
) -> None:
    stop_at(5)
    with pytest.raises(Stopped):
        train_sae(TrainSAEConfig(**{**vars(run[1]), "out": str(tmp_path / "out")}))
    assert list(tmp_path.iterdir()) == []


def test_activations_on_disk_serve_a_second_run(
    run: tuple[Path, TrainSAEConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, cfg = run
    settings = {**vars(cfg), "cache": str(tmp_path / "cache")}
    train_sae(TrainSAEConfig(**{**settings, "out": str(tmp_path / "first")}))

    def inputs(self: Harvester, start: int = 0) -> Any:
        if self.label is None:
            raise AssertionError("the backbone ran again for training")
        return original(self, start)

    original = Harvester.inputs
    monkeypatch.setattr(Harvester, "inputs", inputs)
    monkeypatch.setattr("remind.train_sae.run.Run._frequencies", lambda self: frequencies)
    frequencies = {layer: DocumentFrequency(256) for layer in (2, 4)}
    settings["loss_windows"] = 0
    train_sae(TrainSAEConfig(**{**settings, "out": str(tmp_path / "second")}))
    for name in ("first", "second"):
        weights = tmp_path / name / "layer_02" / "sae_weights.safetensors"
        assert weights.read_bytes() == (out / "layer_02" / "sae_weights.safetensors").read_bytes()
    with pytest.raises(ModelError, match="made with layers"):
        train_sae(TrainSAEConfig(**{**settings, "out": str(tmp_path / "third"), "layers": [2]}))


@pytest.mark.slow
def test_two_processes_train_one_set(run: tuple[Path, TrainSAEConfig], tmp_path: Path) -> None:
    _, cfg = run
    root = Path(__file__).parents[2]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(as_dict(cfg) | {"out": str(tmp_path / "out")}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu_2.yaml"]
    done = subprocess.run(
        [*launch, "scripts/train_sae.py", "--config", str(tmp_path / "config.yaml")],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    one = json.loads((layer_folder(run[0], 2) / "training.json").read_text())
    two = json.loads((layer_folder(tmp_path / "out", 2) / "training.json").read_text())
    assert two["processes"] == 2
    assert (two["steps"], two["tokens"]) == (one["steps"], one["tokens"])
    # the same tokens are harvested and judged, each by one of the two
    for name in ("kept", "special", "batches"):
        assert two["harvest"][name] == one["harvest"][name]
    assert two["held_out"]["tokens"] == one["held_out"]["tokens"]
    assert two["held_out"]["fvu"] == pytest.approx(one["held_out"]["fvu"], rel=0.2)
    assert two["loss_recovered"]["2"]["ce_clean"] == pytest.approx(one["loss_recovered"]["2"]["ce_clean"], rel=1e-5)


def test_quick_sae_is_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write_chat(tmp_path / "chat.jsonl")
    first = quick_sae("nano", [str(data)], tmp_path / "cache", steps=3)
    assert list(load_layers(first)) == [3]

    def never(_: Any) -> Path:
        raise AssertionError("trained twice")

    monkeypatch.setattr("remind.train_sae.train.train_sae", never)
    assert quick_sae("nano", [str(data)], tmp_path / "cache", steps=3) == first
    write_chat(data, n_dialogues=7)
    with pytest.raises(AssertionError, match="trained twice"):
        quick_sae("nano", [str(data)], tmp_path / "cache", steps=3)


@pytest.mark.slow
def test_real_dialogues_on_a_real_encoder(remind_data: Path, tmp_path: Path) -> None:
    cfg = TrainSAEConfig(
        out=str(tmp_path / "out"),
        data=[str(remind_data / "msc"), str(remind_data / "friends" / "emorynlp_csv")],
        layers=[5],
        limit=300,
        window=128,
        idf_turns=100,
        trainer=SAETrainConfig(d_sae=1024, steps=30, batch_size=1024, lr=2e-3, warmup_steps=5, log_every=29),
    )
    out = train_sae(cfg)
    record = json.loads((layer_folder(out, 5) / "training.json").read_text())
    first = json.loads((out / "metrics.jsonl").read_text().splitlines()[0])
    assert record["held_out"]["fvu"] < 0.45 < 0.55 < first["fvu"]
    idf = load_idf(layer_folder(out, 5))
    assert idf is not None
    assert float(idf.max()) <= math.log(101) + 1e-6
