"""States become examples; every example gets its turn, on any number of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remind.alignment.config import DataConfig
from remind.alignment.data import Examples, Order, check_trainable, load_data, select, share
from remind.alignment.tokens import example_of
from remind.core.errors import DataError
from remind.models.chat import end_token_id, prompt_ids
from remind.models.nano import nano_tokenizer
from remind.states.parquet import StateRecord

EMPTY = ["  \n", "<answer></answer><explanation>Ana: tea</explanation>"]


def build_examples(tokenizer: Any, records: list[StateRecord], config: DataConfig, length: int) -> Examples:
    """Tokenised and selected, for a model that takes `length` tokens."""
    return select([example_of(tokenizer, record) for record in records], config, length)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return nano_tokenizer()


def test_an_example_is_prompt_target_and_end_token(tokenizer: Any, make_record: Any) -> None:
    record = make_record(1)
    example = example_of(tokenizer, record)
    assert [p.tolist() for p in example.prompts] == [
        prompt_ids(tokenizer, level.text) for level in (record.x0, record.x1, record.x2)
    ]
    assert example.answer[-1] == end_token_id(tokenizer)
    assert tokenizer.decode(example.answer[:-1]) == record.target
    assert example.tokens_under((0, 1, 2)) == sum(map(len, example.prompts)) + 3 * (len(example.answer) - 1)


def test_questions_without_an_answer_are_counted(states: Path, tokenizer: Any) -> None:
    data = load_data(states, tokenizer, DataConfig(), 4096)
    assert [item.id for item in data.train.items] == [f"q{n:03d}" for n in range(6)]
    assert data.train.without_target == ["q006"]
    assert data.about["train"]["without_target"] == 1
    assert data.about["left_out"] == {"without_target": ["q006"]}
    assert data.eval_split == "dev"
    assert [item.id for item in data.held_out.items] == ["q010", "q011", "q012"]
    # test is watched where it is asked for, and in no other's place
    data = load_data(states, tokenizer, DataConfig(), 4096, eval_split="test", eval_limit=1)
    assert (data.eval_split, [item.id for item in data.held_out.items]) == ("test", ["q020"])
    data = load_data(states, tokenizer, DataConfig(), 4096, eval_split="validation")
    assert (data.eval_split, data.held_out.items) == (None, [])


def test_too_long_is_an_error_or_counted(tokenizer: Any, make_record: Any) -> None:
    records = [make_record(1), make_record(2, words=200), make_record(3, target="x " * 300)]
    records += [make_record(4 + n, target=target) for n, target in enumerate(EMPTY)]
    limit = 150
    with pytest.raises(DataError, match=r"\[q002\].*prompt and answer of"):
        build_examples(tokenizer, records[:2], DataConfig(max_length=limit), 4096)
    with pytest.raises(DataError, match=r"\[q003\].*answer of 601 tokens, at most 100"):
        build_examples(tokenizer, records[2:3], DataConfig(max_answer=100), 4096)
    skipped = build_examples(tokenizer, records, DataConfig(max_length=limit, max_answer=100, on_long="skip"), 4096)
    assert [item.id for item in skipped.items] == ["q001"]
    assert skipped.left_out() == {
        "empty_answer": ["q004", "q005"], "long_context": ["q002"], "long_answer": ["q003"]
    }  # fmt: skip
    # what the model takes counts as well; exactly as much is not too much
    length = max(map(len, skipped.items[0].prompts)) + len(skipped.items[0].answer)
    assert len(build_examples(tokenizer, records[:1], DataConfig(), length)) == 1
    with pytest.raises(DataError):
        build_examples(tokenizer, records[:1], DataConfig(), length - 1)


def test_nothing_to_train_on(tmp_path: Path, tokenizer: Any, make_record: Any, make_states: Any) -> None:
    folder = make_states(tmp_path / "s", [make_record(1, "test"), make_record(2, target=None)])
    with pytest.raises(DataError) as caught:
        load_data(folder, tokenizer, DataConfig(), 4096)
    left_out = "nothing to train on: every question of split train is left out: 1 without a gold answer"
    assert str(caught.value) == f"{folder}: {left_out}"
    check_trainable(make_states(tmp_path / "good", [make_record(1, "test"), make_record(2)]))
    folder = make_states(tmp_path / "bad", [make_record(1, "test"), make_record(2, "dev")])
    with pytest.raises(DataError) as caught:
        check_trainable(folder)
    what = "nothing to train on: all are of split dev or test; build states with questions of split train"
    assert str(caught.value) == f"{folder}: {what}"


def test_train_and_test_must_not_share_evidence(
    tmp_path: Path, tokenizer: Any, make_record: Any, make_states: Any
) -> None:
    train = make_record(1)
    leak = replace(make_record(2, "test"), dialogue_id=train.dialogue_id, evidence=train.evidence)
    with pytest.raises(DataError):
        load_data(make_states(tmp_path / "s", [train, leak]), tokenizer, DataConfig(), 4096)


def test_the_fingerprint_sees_any_token(tokenizer: Any, make_record: Any) -> None:
    records = [make_record(1), make_record(2)]
    one = build_examples(tokenizer, records, DataConfig(), 4096)
    other = build_examples(tokenizer, records, DataConfig(), 4096)
    assert one.fingerprint() == other.fingerprint()
    other.items[1].prompts[2][3] += 1
    assert one.fingerprint() != other.fingerprint()


@given(n=st.integers(1, 40), size=st.integers(1, 9), seed=st.integers(0, 5))
def test_an_epoch_shows_every_example_once(n: int, size: int, seed: int) -> None:
    order = Order(n, size, seed)
    for epoch in range(2):
        steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
        batches = [order.batch(step) for step in steps]
        assert Counter(index for batch in batches for index in batch) == Counter(range(n))
        assert all(len(batch) == size for batch in batches[:-1])


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        order = Order(50, 50, seed)
        return order.batch(number)

    assert epoch(0, 0) == epoch(0, 0)
    assert len({tuple(epoch(seed, number)) for seed in range(3) for number in range(3)}) == 9


@given(n=st.integers(1, 30), processes=st.integers(1, 5), size=st.integers(1, 7))
def test_shares_cover_a_batch_once_in_equal_numbers_of_microbatches(n: int, processes: int, size: int) -> None:
    shares = [share(n, rank, processes, size) for rank in range(processes)]
    places = [place for own in shares for micro in own for place in micro]
    assert sorted(places) == list(range(n))
    assert len({len(own) for own in shares}) == 1
    assert all(len(micro) <= size for own in shares for micro in own)
