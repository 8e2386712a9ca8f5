"""The shuffling store: each token once, in an order fixed by the seed, and exactly again from a saved state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sae import ActivationError, ConfigError
from sae.buffer import ShuffleBuffer
from sae.harvest import TokenBatch


def make(sizes: list[int], *args: Any, **options: Any) -> ShuffleBuffer:
    """A buffer over `token_batches`."""
    return ShuffleBuffer(lambda start: token_batches(sizes, start), *args, **options)


def order(buffer: ShuffleBuffer) -> list[int]:
    return [int(token) for batch in buffer for token in batch.activations[2]]


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


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=12).filter(any),
    st.integers(1, 8),
    st.integers(0, 30),
    st.integers(1, 3),
)
def test_each_token_once_per_epoch_in_one_order_for_all_layers(sizes, batch_size, spare, epochs) -> None:
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
    tokens = order(make([10] * 20, 5, 40))
    assert tokens != sorted(tokens)
    assert set(tokens[:20]) <= set(range(40))
    # twenty new tokens have come in, and the first twenty are not handed out again
    assert set(tokens[20:40]) <= set(range(60)) - set(tokens[:20])
    assert order(make([10] * 20, 5, 40)) == tokens
    assert order(make([10] * 20, 5, 40, seed=1)) != tokens


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 23), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 8),
    st.integers(1, 8),
    st.integers(0, 30),
    st.booleans(),
    st.data(),
)
def test_a_buffer_resumes_from_its_state(sizes, batch_size, spare, drop_last, data) -> None:
    first, second, third = (make(sizes, batch_size, 2 * batch_size + spare, 3, 3, drop_last) for _ in range(3))
    whole = list(third)
    count = data.draw(st.integers(0, len(whole)))
    for _ in range(count):
        next(first)
    state = first.state_dict()
    assert not any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in state.values())
    for _ in first:
        pass  # what happens later must not reach the state
    second.load_state_dict(state)
    assert not drop_last or {len(batch.visual) for batch in whole} == {batch_size}
    for (one, visual), (other, expected) in zip(second, whole[count:], strict=True):
        assert torch.equal(visual, expected)
        assert all(torch.equal(one[layer], other[layer]) for layer in (2, 5))


def test_a_state_takes_only_what_is_needed_and_refuses_other_data() -> None:
    starts: list[int] = []

    def source(start: int) -> Iterator[TokenBatch]:
        starts.append(start)
        return token_batches([10] * 40, start)

    buffer = ShuffleBuffer(source, 5, 40)
    for _ in range(60):
        next(buffer)
    state = buffer.state_dict()
    ShuffleBuffer(source, 5, 40).load_state_dict(state)
    assert starts[0] == 0
    assert starts[1] > 10
    for sizes in ([3] * 40, [10] * 20):
        with pytest.raises(ActivationError, match="data have changed"):
            make(sizes, 5, 40).load_state_dict(state)
    with pytest.raises(ActivationError, match="buffer of 40 tokens, not 50"):
        make([10] * 40, 5, 50).load_state_dict(state)
    with pytest.raises(ActivationError, match="3 tokens are left, too few"):
        list(make([3], 4, 20, epochs=None, drop_last=True))
    with pytest.raises(ConfigError, match="at least 2 batches"):
        make([3], 8, 15)
