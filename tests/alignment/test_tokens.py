"""States as tokens on disk, and questions without an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from remind.alignment import tokens
from remind.alignment.cache import Cache, Ranks
from remind.alignment.config import DataConfig, Edge, Objective
from remind.alignment.data import load_data
from remind.alignment.metrics import read_metrics
from remind.alignment.model import trainable
from remind.alignment.step import AlignmentModel, collate, plan, run
from remind.alignment.tokens import Example, decode
from remind.alignment.trainer import Trainer, train
from remind.core.errors import ConfigError, DataError, ModelError
from remind.core.files import read_json
from remind.models.backbone import Backbone
from remind.models.generate import generate
from remind.models.load import load_backbone
from remind.models.nano import nano_tokenizer
from remind.states.parquet import state_parts


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return nano_tokenizer()


@pytest.fixture(scope="module")
def nano() -> Backbone:
    return load_backbone("nano")


# tokens on disk


def test_tokens_from_disk_are_those_of_the_text(
    states: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_data(states, tokenizer, DataConfig(), 4096)
    first = load_data(states, tokenizer, DataConfig(), 4096, cache=Cache(tmp_path))
    monkeypatch.setattr(tokens, "example_of", lambda *_: pytest.fail("tokenised again"))
    again = load_data(states, tokenizer, DataConfig(), 4096, cache=Cache(tmp_path))
    assert plain.about == first.about == again.about
    for one, other in zip(plain.held_out.items, again.held_out.items, strict=True):
        assert (one.id, one.answer.tolist()) == (other.id, other.answer.tolist())
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {".safetensors"}


def test_other_text_or_another_tokenizer_is_another_file(
    tmp_path: Path, tokenizer: Any, make_record: Any, make_states: Any
) -> None:
    def files() -> int:
        return len(list((tmp_path / "cache").rglob("*.safetensors")))

    cache = Cache(tmp_path / "cache")
    folder = make_states(tmp_path / "s", [make_record(1)])
    load_data(folder, tokenizer, DataConfig(), 4096, cache=cache)
    assert files() == 1
    load_data(folder, tokenizer, DataConfig(max_answer=2000, on_long="skip"), 4096, cache=cache)
    assert files() == 1
    other = nano_tokenizer()
    other.chat_template += "\n"
    load_data(folder, other, DataConfig(), 4096, cache=cache)
    assert files() == 2
    make_states(folder, [make_record(2)])
    assert [item.id for item in load_data(folder, tokenizer, DataConfig(), 4096, cache=cache).train.items] == ["q002"]
    assert files() == 3


def test_a_damaged_file_is_computed_again_and_said(
    states: Path, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = load_data(states, tokenizer, DataConfig(), 4096, cache=Cache(tmp_path))
    victim = sorted(tmp_path.rglob("*.safetensors"))[3]
    victim.write_bytes(victim.read_bytes()[:-20])
    assert load_data(states, tokenizer, DataConfig(), 4096, cache=Cache(tmp_path)).about == whole.about
    assert f"{victim} is damaged" in caplog.text


def test_processes_divide_the_work_and_read_all_of_it(states: Path, tokenizer: Any, tmp_path: Path) -> None:
    cache, parts = Cache(tmp_path), state_parts(states)

    def files() -> int:
        return len(list(tmp_path.rglob("*.safetensors")))

    counts: list[int] = []
    second = Ranks(1, 2, lambda: counts.append(files()))

    def wait() -> None:
        counts.append(files())
        tokens.read_examples(parts, tokenizer, cache, second)

    rows = tokens.read_examples(parts, tokenizer, cache, Ranks(0, 2, wait))
    assert counts == [(len(parts) + 1) // 2, len(parts)]
    assert [row.id for row in rows] == [row.id for row in tokens.read_examples(parts, tokenizer)]


# questions without an answer


def test_answers_are_the_models_greedy_ones_decoded_once(
    nano: Backbone, tmp_path: Path, make_record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run killed between two files decodes only what is missing; other weights decode anew."""
    monkeypatch.setattr("remind.alignment.tokens._BLOCK", 2)
    records = [make_record(n, target=None) for n in range(5)]
    decoded = {level: decode(nano, records, level, 6, Cache(tmp_path / level), "base") for level in ("x2", "x1")}
    for level, answers in decoded.items():
        outputs = generate(nano, [record.level(level).text for record in records], 6, batch_size=1)
        assert list(answers.values()) == [output.text for output in outputs if output]
    files = sorted((tmp_path / "x2").rglob("*.safetensors"))
    assert len(files) == 3
    files[1].unlink()
    counts: list[int] = []
    real = tokens.generate

    def counted(backbone: Any, prompts: list[str], *args: Any, **settings: Any) -> Any:
        counts.append(len(prompts))
        return real(backbone, prompts, *args, **settings)

    monkeypatch.setattr(tokens, "generate", counted)
    assert decode(nano, records, "x2", 6, Cache(tmp_path / "x2"), "base") == decoded["x2"]
    assert len(counts) == 1
    decode(nano, records, "x2", 6, Cache(tmp_path / "x2"), "other")
    assert sum(counts[1:]) == 5


def test_decoding_says_how_many_questions_are_answered(
    nano: Backbone,
    tmp_path: Path,
    make_record: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("REMIND_QUIET", raising=False)
    monkeypatch.setattr("remind.core.progress.LINE_SECONDS", 0.0)
    decode(nano, [make_record(n, target=None) for n in range(3)], "x2", 2, Cache(tmp_path), "base", batch_size=1)
    counts = [line.split()[4] for line in capsys.readouterr().err.split("\r") if "answer from x2" in line]
    assert list(dict.fromkeys(counts)) == ["0/3", "1/3", "2/3", "3/3"]


def test_a_partly_labelled_run(runs: Any, states: Path, tmp_path: Path) -> None:
    """Six questions have gold answers, q006 has none; its answer is decoded before the first step."""
    data = DataConfig(max_decoded=8)
    cfg = runs.config(states, tmp_path / "r", data=data, max_steps=3, batch_size=7)
    trainer = Trainer(cfg)
    assert [item.labelled for item in trainer.data.train.items] == [True] * 6 + [False]
    trainer.fit()
    about = read_json(tmp_path / "r" / "data.json")
    assert (about["train"]["examples"], about["train"]["labelled"]) == (7, 6)
    assert about["held_out"]["labelled"] == about["held_out"]["examples"] == 3
    for row in read_metrics(tmp_path / "r"):
        if row["kind"] == "train":
            # the mean over all seven of a loss that six have
            assert 0 < row["hard"] < row["ce0"]
            assert row["share_hard"] + row["share_dist01"] + row["share_dist12"] == pytest.approx(1)
    # what was decoded is part of what a resume must find as it was
    train(replace(cfg, resume=True))
    (tmp_path / "r" / "cache").rename(tmp_path / "gone")
    train(replace(cfg, resume=True))
    assert len(list((tmp_path / "r" / "cache" / "decoded").iterdir())) == 1


def test_a_run_without_any_label(runs: Any, tmp_path: Path, make_record: Any, make_states: Any) -> None:
    records = [make_record(n, target=None) for n in range(4)] + [make_record(10, "dev", target=None)]
    folder = make_states(tmp_path / "s", records)
    data = DataConfig(max_decoded=6, unlabelled="x1")
    out = train(runs.config(folder, tmp_path / "r", data=data, max_steps=2))
    rows = read_metrics(out)
    assert all(row["hard"] == 0 for row in rows)
    assert all(row["total"] > 0 and row["ce0"] > 0 for row in rows)
    with pytest.raises(ConfigError, match="no question has a gold answer"):
        sft = Objective(lambda_hard=1.0)
        train(runs.config(folder, tmp_path / "sft", data=data, max_steps=2, objective=sft))
    with pytest.raises(DataError, match="nothing to train on"):
        train(runs.config(folder, tmp_path / "none", data=DataConfig(unlabelled="skip")))


def test_an_unlabelled_sample_has_the_gradient_of_its_divergences_alone(make_model: Any, make_examples: Any) -> None:
    """Two samples, the second without a label, against a reference that leaves its cross-entropy out by hand."""
    one, two = make_examples([(5, 7, 9, 4), (8, 6, 12, 3)])
    objective = Objective(chunk=2, edges=(Edge(0, 1), Edge(1, 2)))
    module = AlignmentModel(trainable(make_model(), None), objective)

    def gradient(example: Example, objective: Objective, scale: float) -> dict[str, torch.Tensor]:
        module.objective = objective
        module.zero_grad()
        run(module, collate([example], [scale]), plan(objective), lambda loss: loss.backward())
        return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}

    labelled = gradient(one, objective, 0.5)
    # (1 - λ) of the distillation alone, with λ = 0 and γ scaled to match
    soft = replace(objective, lambda_hard=0.0, edges=(Edge(0, 1, 2.4), Edge(1, 2, 2.4)))
    alone = gradient(two, soft, 0.5)
    module.objective = objective
    module.zero_grad()
    batch = collate([one, replace(two, labelled=False)], [0.5, 0.5])
    values = run(module, batch, plan(objective), lambda loss: loss.backward())
    for name, parameter in module.named_parameters():
        if name in alone:
            torch.testing.assert_close(parameter.grad, labelled[name] + alone[name], rtol=1e-9, atol=1e-12)
    assert values["hard0"][1] == 0
    assert values["ce0"][1] > 0


def test_a_full_disk_under_the_cache(
    states: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ModelError, match="No space left on device; make room"):
        load_data(states, tokenizer, DataConfig(), 4096, cache=Cache(tmp_path))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
