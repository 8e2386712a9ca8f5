"""Rows become examples; every example gets its turn, on any number of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from remind import PRAConfig, PRATrainer
from remind.alignment.examples import Batches, Examples, example_of, examples_of, select
from remind.alignment.metrics import read_metrics
from remind.core.errors import ConfigError, DataError, ModelError, RemindError
from remind.core.files import read_json
from remind.models.backbone import load_backbone
from remind.models.nano import nano_tokenizer
from remind.states.dataset import load_states, write_states
from remind.states.records import StateRecord
from remind.train_pra.config import DataConfig
from remind.train_pra.run import make_trainer, train

EMPTY = ["  \n", "<answer></answer><explanation>Ana: tea</explanation>"]


def chosen(tokenizer: Any, records: list[StateRecord], length: int = 4096, **settings: Any) -> Examples:
    """Tokenised and selected, for a model that takes `length` tokens."""
    return select(examples_of(tokenizer, records), DataConfig(**settings), length)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return nano_tokenizer()


def trainer_of(out: Path, rows: Any, held_out: Any = None, **settings: Any) -> PRATrainer:
    args = PRAConfig(str(out), **{"unlabelled": "skip", **settings})
    return PRATrainer("nano-untrained", args, rows, held_out)


def refused(error: type[RemindError], message: str, *arguments: Any, **settings: Any) -> None:
    with pytest.raises(error, match=rf"^[^\n]*{message}[^\n]*$"):
        trainer_of(*arguments, **settings)


# rows


def test_rows_of_all_kinds_are_the_same_examples(make_record: Any, tmp_path: Path, runs: Any) -> None:
    from datasets import Dataset

    records = [make_record(n) for n in range(4)] + [make_record(4, target=None)]
    write_states(tmp_path / "states", records)
    plain = [runs.row(record) for record in records]
    nested = [row | {level: {"text": row[level], "dialogue": [0, 1]} for level in ("x0", "x1", "x2")} for row in plain]
    parquet = load_states(tmp_path / "states")["train"]
    expected = [example_of(nano_tokenizer(), record) for record in records[:4]]
    for rows in (records, iter(records), plain, nested, parquet, Dataset.from_list(plain), tmp_path / "states"):
        found = trainer_of(tmp_path / "r", rows).train_dataset
        assert found.fingerprint() == Examples(expected).fingerprint()
        assert found.left_out == {"without a gold answer": 1}
        assert not found.items[0].images


def test_rows_that_cannot_be_used_are_refused_in_a_line(make_record: Any, tmp_path: Path, runs: Any) -> None:
    row = runs.row(make_record(1))
    without = {name: {key: value for key, value in row.items() if key != name} for name in ("x0", "target")}
    refused(DataError, r"\[q001\]: .*no column x0; there are question_id, target, x1, x2", tmp_path, [without["x0"]])
    refused(DataError, "no column target; there are question_id, x0, x1, x2", tmp_path, [without["target"]])
    for value in (None, 3, {"words": "a"}):
        refused(DataError, "x0 is not a text", tmp_path, [row | {"x0": value}])
    refused(DataError, "target is neither", tmp_path, [row | {"target": ["a"]}])
    refused(DataError, r"\[q001\]: .*occurs twice", tmp_path, [row, row])
    refused(DataError, "nothing to train on; questions left out: none", tmp_path, [])
    refused(DataError, "nothing to train on; questions left out: 1 without a gold", tmp_path, [row | {"target": None}])
    one = {name: row[name] for name in ("question_id", "x0", "x1", "target")}
    refused(DataError, "needs x2, and the data have no such column", tmp_path, [one])
    refused(DataError, "row 0", tmp_path, ["x0"])
    # rows of texts alone do not say where images stand
    refused(DataError, r"\[q001\]", tmp_path, [row], images="pixels")
    # without ids questions have numbers
    unnamed = [{key: value for key, value in row.items() if key != "question_id"}] * 2
    assert [item.id for item in trainer_of(tmp_path, unnamed).train_dataset.items] == ["row 0", "row 1"]
    backbone = load_backbone("nano-untrained")
    backbone.tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"^the tokenizer has no chat template[^\n]*$"):
        PRATrainer(backbone.model, PRAConfig(str(tmp_path)), [row], processing_class=backbone.tokenizer)


def test_too_long_is_an_error_or_counted(tokenizer: Any, make_record: Any) -> None:
    records = [make_record(1), make_record(2, words=200), make_record(3, target="x " * 300)]
    records += [make_record(4 + n, target=target) for n, target in enumerate(EMPTY)]
    limit = 150
    with pytest.raises(DataError, match=r"\[q002\].*prompt and answer of"):
        chosen(tokenizer, records[:2], max_length=limit)
    with pytest.raises(DataError, match=r"\[q003\].*of which the answer 601; at most \d+ and 100 fit"):
        chosen(tokenizer, records[2:3], max_answer=100)
    skipped = chosen(tokenizer, records, max_length=limit, max_answer=100, on_long="skip", unlabelled="skip")
    assert [item.id for item in skipped.items] == ["q001"]
    assert skipped.left_out == {"without a gold answer": 2, "too long": 2}
    # what the model takes counts as well; exactly as much is not too much
    length = max(map(len, skipped.items[0].prompts)) + len(skipped.items[0].answer)
    assert len(chosen(tokenizer, records[:1], length)) == 1
    with pytest.raises(DataError):
        chosen(tokenizer, records[:1], length - 1)
    # room for what the student may answer
    with pytest.raises(DataError, match=r"at most 120 and"):
        chosen(tokenizer, records[:1], targets="on_policy", max_decoded=100, max_length=120)


# what the command reads


def test_the_command_reads_a_split_of_states_and_writes_what_it_left_out(
    runs: Any, states: Path, tmp_path: Path
) -> None:
    out = train(runs.config(states, tmp_path / "r", max_steps=1))
    about = read_json(out / "data.json")
    assert about["train"] == {"examples": 6, "labelled": 6, "left_out": {"without a gold answer": 1}}
    assert (about["held_out"]["split"], about["held_out"]["examples"]) == ("dev", 3)
    for number, (data, ids) in enumerate(
        [
            (DataConfig(unlabelled="skip", eval_split="test", eval_limit=1, limit=2), ["q020"]),
            (DataConfig(unlabelled="skip", eval_split="validation"), []),
        ]
    ):
        trainer = make_trainer(runs.config(states, tmp_path / f"r{number}", data=data))
        assert len(trainer.train_dataset) == (data.limit or 6)
        assert [item.id for item in trainer.eval_dataset.items] == ids
        # test is watched where it is asked for, and chooses nothing
        assert trainer.args.metric_for_best_model is None


def test_states_without_a_training_split_and_those_that_leak(
    runs: Any, tmp_path: Path, make_record: Any, make_states: Any
) -> None:
    folder = make_states(tmp_path / "bad", [make_record(1, "test"), make_record(2, "dev")])
    with pytest.raises(DataError) as caught:
        make_trainer(runs.config(folder, tmp_path / "r"))
    what = "nothing to train on: all are of split dev or test; build states with questions of split train"
    assert str(caught.value) == f"{folder}: {what}"
    one = make_record(1)
    leak = replace(make_record(2, "test"), dialogue_id=one.dialogue_id, evidence=one.evidence)
    with pytest.raises(DataError, match="evidence"):
        make_trainer(runs.config(make_states(tmp_path / "s", [one, leak]), tmp_path / "r"))
    folder = make_states(tmp_path / "none", [make_record(2, target=None)])
    with pytest.raises(DataError, match="nothing to train on; questions left out: 1 without"):
        make_trainer(runs.config(folder, tmp_path / "r"))
    assert not (tmp_path / "r").exists()


# questions without an answer


def test_a_partly_labelled_run(runs: Any, states: Path, tmp_path: Path) -> None:
    """Six questions have gold answers, q006 has none; its answer is decoded before the first step."""
    cfg = runs.config(states, tmp_path / "r", data=DataConfig(max_decoded=8), max_steps=3, batch_size=7)
    trainer = make_trainer(cfg)
    assert [item.labelled for item in trainer.train_dataset.items] == [True] * 6 + [False]
    trainer.train()
    about = read_json(tmp_path / "r" / "data.json")
    assert (about["train"]["examples"], about["train"]["labelled"]) == (7, 6)
    assert about["held_out"]["examples"] == 3
    for row in read_metrics(tmp_path / "r"):
        if row["kind"] == "train":
            # the mean over all seven of a loss that six have
            assert 0 < row["hard"] < row["ce0"]
            assert row["share_hard"] + row["share_dist01"] + row["share_dist12"] == pytest.approx(1)


@pytest.mark.parametrize("targets", ["gold", "on_policy"])
def test_a_run_without_any_label(targets: str, make_record: Any, tmp_path: Path) -> None:
    rows, held_out = [make_record(n, target=None) for n in range(4)], [make_record(10, target=None)]
    told: dict[str, Any] = {"unlabelled": "x1", "max_decoded": 6, "max_steps": 2, "disable_tqdm": True}
    trainer_of(tmp_path / "r", rows, held_out, targets=targets, **told).train()
    found = read_metrics(tmp_path / "r")
    assert {row["kind"] for row in found} == {"train", "eval"}
    assert all(row["hard"] == 0 and row["total"] > 0 and row["ce0"] > 0 for row in found)
    if targets == "gold":
        refused(ConfigError, "no question has a gold answer", tmp_path / "s", rows, lambda_hard=1.0, **told)


# the order


@given(
    n=st.integers(1, 30), pieces=st.integers(1, 3), processes=st.integers(1, 3), share=st.integers(1, 3),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_shows_every_example_once(n: int, pieces: int, processes: int, share: int, seed: int) -> None:
    """Over all processes, each with as many microbatches; the content of a step does not depend on how it is cut."""
    size = pieces * processes * share
    whole = Batches(n, size, seed=seed)
    for epoch in range(2):
        orders = [Batches(n, size, pieces, rank, processes, seed) for rank in range(processes)]
        for order in orders:
            order.set_epoch(epoch)
        found = [list(order) for order in orders]
        assert {len(own) for own in found} == {len(orders[0])} == {whole.steps_per_epoch * pieces}
        seen: Counter[int] = Counter()
        for step in range(whole.steps_per_epoch):
            samples = [s for own in found for micro in own[step * pieces : (step + 1) * pieces] for s in micro]
            assert all(1 <= len(micro) <= share for own in found for micro in own)
            counted = [(place, weight) for place, weight in samples if weight > 0]
            assert sorted(place for place, _ in counted) == sorted(whole.batch(epoch * whole.steps_per_epoch + step))
            assert len({weight for _, weight in counted}) == 1
            assert sum(weight for _, weight in counted) == pytest.approx(1)
            seen.update(place for place, _ in counted)
        assert seen == Counter(range(n))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def epochs() -> list[list[int]]:
        return [Batches(50, 50, seed=seed).batch(number) for seed in range(3) for number in range(3)]

    torch.manual_seed(1)
    once = epochs()
    torch.manual_seed(2)
    assert epochs() == once
    assert len(set(map(tuple, once))) == 9
    assert Batches(5, 2, shuffle=False).batch(1) == [2, 3]
