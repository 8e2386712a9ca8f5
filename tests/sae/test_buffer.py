"""The shuffling store: each token once, the same bits, and exactly again from a saved state."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sae.buffer import ShuffleBuffer
from sae.harvest import TokenBatch

SIZES = st.lists(st.integers(0, 23), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) >= 8)


class Source:
    """Tokens numbered through, in batches of these sizes; one of size 0 is absent, as where every token was dropped."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.starts = sizes, list[int]()

    def __call__(self, first: int) -> Iterator[TokenBatch]:
        self.starts.append(first)
        start = 0
        for number, size in enumerate(self.sizes):
            which = torch.arange(start, start + size)
            start += size
            if number >= first and size:
                layers = {2: which[:, None].bfloat16(), 5: -which[:, None].expand(size, 3).double()}
                yield TokenBatch(layers, which % 3 == 0, which, which + 1, number)


@settings(max_examples=50)
@given(SIZES, st.integers(1, 8), st.integers(0, 30))
def test_each_token_once_per_epoch_in_one_order_for_all_layers(sizes: list[int], batch_size: int, spare: int) -> None:
    source, total = Source(sizes), sum(sizes)
    buffer = ShuffleBuffer(source, batch_size, 2 * batch_size + spare, seed=4)
    count = total // batch_size
    for _ in range(3):
        seen: list[int] = []
        for batch in islice(buffer, count):
            tokens = -batch[5][:, 0].long()
            assert torch.equal(batch[2][:, 0], tokens.bfloat16())
            seen += tokens.tolist()
        assert len(set(seen)) == len(seen) == count * batch_size
    assert len(source.starts) == (1 if total < buffer.capacity else 3)


@settings(max_examples=50)
@given(SIZES, st.integers(1, 8), st.integers(0, 30), st.integers(0, 40))
def test_a_buffer_resumes_from_its_state(sizes: list[int], batch_size: int, spare: int, count: int) -> None:
    first, second = (ShuffleBuffer(Source(sizes), batch_size, 2 * batch_size + spare, 3) for _ in range(2))
    list(islice(first, count))
    second.load_state_dict(first.state_dict())
    for one, other in zip(islice(second, 30), islice(first, 30), strict=True):
        assert all(torch.equal(one[layer], other[layer]) for layer in (2, 5))
