"""Encoding and decoding against Eq. 2 written out, ties, and files."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sae
from sae import FormatError, StorageError, TopKSAE, files
from sae.topk import largest


@pytest.mark.parametrize(("leading", "k"), [((), 1), ((2, 3), 5), ((2, 3), 12), ((2, 0), 5)])
def test_encode_and_decode_match_brute_force(leading, k, make_coder, dense, monkeypatch) -> None:
    coder = make_coder(6, 12, k)
    for parameter in coder.parameters():
        parameter.mul_(9).round_()  # so that features tie
    h = torch.randn(*leading, 6, dtype=torch.float64).round()
    codes = coder.encode(h)
    expected = dense(coder, h)
    # in chunks of four tokens
    monkeypatch.setattr("sae.topk._CHUNK", 12 * 4)
    assert torch.equal(coder.encode(h).indices, codes.indices)
    # other dtypes are computed in that of the coder
    assert torch.equal(coder.encode(h.bfloat16()).values, coder.encode(h.bfloat16().double()).values)
    assert torch.equal(codes.dense(12), expected)
    torch.testing.assert_close(coder.decode(codes), expected @ coder.W_dec + coder.b_dec, rtol=0, atol=1e-12)


@given(st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([40, 256, 768, 1000, 4096]), st.integers(1, 33))
def test_largest_finds_what_sorting_finds(seed: int, n: int, width: int, k: int) -> None:
    # few distinct values, so that ties abound
    x = torch.randint(-9, 50, (n, width), generator=torch.Generator().manual_seed(seed)).float()
    values, indices = largest(x, k)
    assert torch.equal(values.sort(1, descending=True).values, x.sort(1, descending=True).values[:, :k])
    assert torch.equal(x.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


def test_the_package_imports_without_torch() -> None:
    code = "import sys, sae; assert not {'torch', 'numpy', 'remind'} & set(sys.modules); print(*sae.__all__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == sae.__all__
    assert all(getattr(sae, name).__name__ == name for name in sae.__all__)


def test_what_cannot_be_read_or_written_says_why(tmp_path: Path) -> None:
    coder = TopKSAE(6, 24, 4).requires_grad_(False)
    coder.b_enc[3] = math.inf
    for damage, message in (
        (lambda: None, "b_enc holds values that are not finite"),
        (lambda: os.truncate(tmp_path / "sae_weights.safetensors", 99), "sae_weights.safetensors: cannot be read"),
        ((tmp_path / "cfg.json").unlink, "cfg.json: cannot be read: No such file"),
    ):
        coder.save(tmp_path)
        damage()
        with pytest.raises(FormatError, match=f"{tmp_path}.*{message}"):
            TopKSAE.load(tmp_path)
    with pytest.raises(StorageError, match="b: cannot be written"):
        files.write_torch(tmp_path / "sae_weights.safetensors" / "b", {})
