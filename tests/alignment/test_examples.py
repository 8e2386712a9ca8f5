"""Rows become examples; every example gets its turn, on any number of processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remind.alignment.examples import Batches, Examples, examples_of, select
from remind.core.errors import DataError, ModelError
from remind.models.backbone import load_backbone
from remind.models.nano import nano_tokenizer
from remind.states.records import StateRecord
from remind.train_pra.config import DataConfig
from remind.train_pra.run import make_trainer


def test_rows_that_cannot_be_used_are_refused_in_a_line(runs: Any, make_record: Any, tmp_path: Path) -> None:
    def refused(message: str, *rows: Any, **settings: Any) -> None:
        with pytest.raises(DataError, match=rf"^[^\n]*{message}[^\n]*$"):
            runs.trainer(tmp_path, rows, **{"unlabelled": "skip", **settings})

    row = runs.row(make_record(1))
    without = {name: {key: value for key, value in row.items() if key != name} for name in row}
    refused(r"\[q001\]: .*no column x0; there are question_id, target, x1, x2", without["x0"])
    refused("x0 is not a text", row | {"x0": {"words": "a"}})
    refused(r"\[q001\]: .*occurs twice", row, row)
    refused("nothing to train on; questions left out: 1 without an answer", row | {"target": None})
    refused("needs x2, and the data have no such column", without["x2"])
    # rows of texts alone do not say where images stand
    refused(r"\[q001\]", row, images="pixels")
    # without ids questions have numbers
    found = runs.trainer(tmp_path, [without["question_id"]] * 2).train_dataset
    assert [item.id for item in found.items] == ["row 0", "row 1"]
    nano = load_backbone("nano-untrained")
    nano.tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"^the tokenizer has no chat template[^\n]*$"):
        runs.trainer(tmp_path, [row], None, nano.model, processing_class=nano.tokenizer)


def test_too_long_is_an_error_or_counted(make_record: Any) -> None:
    def chosen(records: list[StateRecord], length: int = 4096, **settings: Any) -> Examples:
        return select(examples_of(nano_tokenizer(), records), DataConfig(**settings), length)

    records = [make_record(1), make_record(2, words=200), make_record(3, target="x " * 300), make_record(4, target=" ")]
    with pytest.raises(DataError, match=r"\[q002\].*prompt and answer of"):
        chosen(records[:2], max_length=150)
    with pytest.raises(DataError, match=r"\[q003\].*of which the answer 601; at most \d+ and 100 fit"):
        chosen(records[2:3], max_answer=100)
    skipped = chosen(records, max_length=150, max_answer=100, on_long="skip", unlabelled="skip")
    assert [item.id for item in skipped.items] == ["q001"]
    assert skipped.left_out == {"without an answer": 1, "too long": 2}
    # what the model takes counts as well; exactly as much is not too much
    length = max(map(len, skipped.items[0].prompts)) + len(skipped.items[0].answer)
    assert len(chosen(records[:1], length)) == 1
    with pytest.raises(DataError):
        chosen(records[:1], length - 1)


# what the command reads


def test_the_command_reads_a_split_of_states(runs: Any, states: Path, tmp_path: Path) -> None:
    data = DataConfig(unlabelled="skip", eval_split="test", eval_limit=1, limit=2)
    trainer = make_trainer(runs.config(states, tmp_path / "r", data=data))
    assert len(trainer.train_dataset) == 2
    assert [item.id for item in trainer.eval_dataset.items] == ["q020"]
    # test is watched where it is asked for, and chooses nothing
    assert trainer.args.metric_for_best_model is None


# the order


@given(
    n=st.integers(1, 30), pieces=st.integers(1, 3), processes=st.integers(1, 3), share=st.integers(1, 3),
    seed=st.integers(0, 3),
)  # fmt: skip
def test_an_epoch_shows_every_example_once(n: int, pieces: int, processes: int, share: int, seed: int) -> None:
    """Over all processes, each with as many microbatches; the content of a step does not depend on how it is cut."""
    whole = Batches(n, pieces * processes * share, seed=seed)
    for epoch in range(2):
        orders = [Batches(n, whole.batch_size, pieces, rank, processes, seed) for rank in range(processes)]
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
