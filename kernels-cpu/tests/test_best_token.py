"""The best token of each row, against Python's own maximum."""

from __future__ import annotations

import math

import pytest
import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.best_token import DTYPES, best_token

pytestmark = pytest.mark.skipif(
    native.unavailable_reason() is not None, reason=str(native.unavailable_reason())
)


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "vocab_size"), [(1, 1), (3, 7), (5, 64), (2, 1025), (40, 5001)])
def test_first_of_the_largest(level: str, dtype: torch.dtype, n: int, vocab_size: int) -> None:
    if level not in native.levels():
        pytest.skip("not on this machine")
    generator = torch.Generator().manual_seed(n)
    for logits in (
        torch.randint(-3, 3, (n, vocab_size), generator=generator).to(dtype),  # with ties
        torch.randn(n, vocab_size, generator=generator).to(dtype) - 9,  # all negative
        torch.randn(n, 2 * vocab_size, generator=generator).to(dtype)[:, vocab_size:],  # apart
        torch.randn(vocab_size, n, generator=generator).to(dtype).t(),
        torch.tensor([-0.0, 0.0, -1.0]).to(dtype).expand(2, 3),
    ):
        token_ids, is_wrong = best_token(logits, level)
        assert token_ids.tolist() == [row.index(max(row)) for row in logits.tolist()]
        assert not is_wrong.any()


@pytest.mark.parametrize("level", native.LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_told(level: str, dtype: torch.dtype, bad: float) -> None:
    if level not in native.levels():
        pytest.skip("not on this machine")
    logits = torch.randn(4, 3000).to(dtype)
    logits[1, :2999], logits[1, 2999] = bad, 0.0
    logits[2] = bad
    logits[3, :2999] = -math.inf
    token_ids, is_wrong = best_token(logits, level)
    assert is_wrong.tolist() == [0, int(bad != -math.inf), 1, 0]
    assert token_ids.tolist() == [logits[0].argmax(), 2999 if bad == -math.inf else 0, 0, 2999]
