"""The most likely token, ties and rows without one."""

from __future__ import annotations

import math

import pytest
import torch

from inferplane_kernels_triton.best_token import BLOCK, best_token
from kernel_checks import gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check(logits: torch.Tensor) -> None:
    """Against a search on the host."""
    tokens, is_wrong = best_token(logits).tolist()
    for row, token, wrong in zip(logits.double().tolist(), tokens, is_wrong):
        has_one = not any(map(math.isnan, row)) and math.isfinite(max(row))
        assert (token, wrong) == ((row.index(max(row)), 0) if has_one else (0, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 50, BLOCK + 1, 2 * BLOCK + 77])
def test_it_is_the_first_of_the_largest(vocab_size: int, dtype: torch.dtype, device: torch.device):
    check(torch.randn(3, vocab_size, device=device).mul(2).round().to(dtype))


def test_ties_within_and_between_blocks(device: torch.device):
    logits = torch.zeros(4, 3 * BLOCK, device=device)
    logits[0, [BLOCK - 1, BLOCK]] = 3.0
    logits[1, [2 * BLOCK + 5, 2 * BLOCK + 9]] = 3.0
    logits[2] = -1.0
    logits[3] = -1e30
    logits[3, -1] = -1e29
    assert best_token(logits)[0].tolist() == [BLOCK - 1, 2 * BLOCK + 5, 0, 3 * BLOCK - 1]
    check(logits)


def test_rows_without_a_token(device: torch.device):
    inf, nan = float("inf"), float("nan")
    logits = torch.randn(6, BLOCK + 10, device=device)
    logits[0] = -inf
    logits[1, BLOCK + 3] = nan
    logits[2] = nan
    logits[3, 7] = inf
    logits[4, 8] = -inf
    assert best_token(logits)[1].tolist() == [1, 1, 1, 1, 0, 0]
    check(logits)


def test_rows_of_a_larger_tensor_and_none_at_all(device: torch.device):
    check(torch.randn(4, 200, device=device)[1:, 10:150])
    assert best_token(torch.zeros(0, 10, device=device)).shape == (2, 0)


@gpu
@pytest.mark.parametrize("num_rows", [1, 3, 32, 256])
def test_at_real_shapes(num_rows: int, device: torch.device):
    check(torch.randn(num_rows, 128256, device=device).to(torch.bfloat16))
