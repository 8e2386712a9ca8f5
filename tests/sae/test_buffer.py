"""The shuffling store: each token once, in an order fixed by the seed, and exactly again from a saved state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sae import ActivationError, ConfigError
from sae.buffer import ShuffleBuffer
from sae.harvest import TokenBatch


def token_batches(sizes: list[int], first: int = 0) -> Iterator[TokenBatch]:
    """Tokens numbered through; a batch of size 0 is absent, as where every token was dropped."""
    start = 0
    for number, size in enumerate(sizes):
        which = torch.arange(start, start + size)
        start += size
        if number < first or not size:
            continue
        yield TokenBatch(
            activations={2: which[:, None].float(), 5: -which[:, None].expand(size, 3).double()},
            visual=which % 3 == 0,
            rows=which,
            positions=which,
            batch=number,
        )


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=12).filter(any),
    st.integers(1, 8),
    st.integers(0, 30),
    st.integers(1, 3),
)
def test_each_token_once_per_epoch_in_one_order_for_all_layers(
    sizes: list[int], batch_size: int, spare: int, epochs: int
) -> None:
    total = sum(sizes)
    harvests = 0

    def source(start: int) -> Iterator[TokenBatch]:
        nonlocal harvests
        harvests += 1
        return token_batches(sizes, start)

    buffer = ShuffleBuffer(source, batch_size, 2 * batch_size + spare, seed=4, epochs=epochs)
    seen: list[int] = []
    for activations, visual in buffer:
        tokens = activations[2].squeeze(1).long()
        assert torch.equal(activations[5], -tokens[:, None].expand(-1, 3).double())
        assert torch.equal(visual, tokens % 3 == 0)
        assert 1 <= len(tokens) <= batch_size
        seen += tokens.tolist()
    for epoch in range(epochs):
        assert sorted(seen[epoch * total : (epoch + 1) * total]) == list(range(total))
    assert harvests == (1 if total <= buffer.capacity else epochs)


def test_the_buffer_mixes_and_is_refilled_by_half() -> None:
    buffer = ShuffleBuffer(lambda start: token_batches([10] * 20, start), 5, 40, seed=0)
    order = [int(token) for batch in buffer for token in batch.activations[2]]
    assert order != sorted(order)
    assert set(order[:20]) <= set(range(40))
    # twenty new tokens have come in, and the first twenty are not handed out again
    assert set(order[20:40]) <= set(range(60)) - set(order[:20])


def test_filling_reports_progress() -> None:
    calls: list[tuple[int, int]] = []

    def make() -> ShuffleBuffer:
        return ShuffleBuffer(
            lambda start: token_batches([10] * 9, start), 5, 40, progress=lambda *call: calls.append(call)
        )

    buffer = make()
    next(buffer)
    assert calls == [(10, 40), (20, 40), (30, 40), (40, 40)]
    for _ in range(4):
        next(buffer)
    assert calls[4:] == [(10, 20), (20, 20)]
    state = buffer.state_dict()
    calls.clear()
    make().load_state_dict(state)
    # the tokens that are still needed
    assert calls[-1] == (35, 35)


def test_the_seed_fixes_the_order() -> None:
    def order(seed: int) -> list[int]:
        buffer = ShuffleBuffer(lambda start: token_batches([7] * 9, start), 4, 16, seed=seed, epochs=2)
        return [int(token) for batch in buffer for token in batch.activations[2]]

    assert order(1) == order(1)
    assert order(1) != order(2)


def test_short_batches_can_be_left_out() -> None:
    sizes = [
        len(batch.visual) for batch in ShuffleBuffer(lambda start: token_batches([11], start), 4, 20, drop_last=True)
    ]
    assert sizes == [4, 4]
    with pytest.raises(ActivationError, match="3 tokens are left, too few"):
        list(ShuffleBuffer(lambda start: token_batches([3], start), 4, 20, epochs=None, drop_last=True))


def test_a_capacity_too_small() -> None:
    with pytest.raises(ConfigError, match="at least 2 batches"):
        ShuffleBuffer(lambda start: token_batches([3], start), 8, 15)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 8),
    st.integers(1, 8),
    st.integers(0, 30),
    st.booleans(),
    st.data(),
)
def test_a_buffer_goes_on_from_its_state_through_json_and_tensors(
    sizes: list[int], batch_size: int, spare: int, drop_last: bool, data: st.DataObject
) -> None:
    def make() -> ShuffleBuffer:
        return ShuffleBuffer(
            lambda start: token_batches(sizes, start), batch_size, 2 * batch_size + spare, 3, 3, drop_last
        )

    whole = list(make())
    first, second = make(), make()
    count = data.draw(st.integers(0, len(whole)))
    for _ in range(count):
        next(first)
    state = first.state_dict()
    assert not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in state.values())
    for _ in first:
        pass  # what happens later must not reach the state
    second.load_state_dict(state)
    rest = list(second)
    assert len(rest) == len(whole) - count
    for (one, seen), (other, known) in zip(rest, whole[count:], strict=True):
        assert torch.equal(seen, known)
        assert all(torch.equal(one[layer], other[layer]) for layer in (2, 5))


def test_a_state_takes_only_what_is_needed_from_the_source() -> None:
    asked: list[int] = []

    def source(start: int) -> Iterator[TokenBatch]:
        asked.append(start)
        return token_batches([10] * 40, start)

    buffer = ShuffleBuffer(source, 5, 40, seed=0)
    for _ in range(60):
        next(buffer)
    other = ShuffleBuffer(source, 5, 40, seed=0)
    other.load_state_dict(buffer.state_dict())
    assert asked[0] == 0
    assert asked[1] > 10


def test_a_state_of_other_data_is_refused() -> None:
    buffer = ShuffleBuffer(lambda start: token_batches([10] * 20, start), 5, 40, seed=0)
    for _ in range(9):
        next(buffer)
    state = buffer.state_dict()
    with pytest.raises(ActivationError, match="data have changed"):
        ShuffleBuffer(lambda start: token_batches([3] * 20, start), 5, 40).load_state_dict(state)
    with pytest.raises(ActivationError, match="data have changed"):
        ShuffleBuffer(lambda start: token_batches([10] * 2, start), 5, 40).load_state_dict(state)
    with pytest.raises(ActivationError, match="buffer of 40 tokens, not 50"):
        ShuffleBuffer(lambda start: token_batches([10] * 20, start), 5, 50).load_state_dict(state)
