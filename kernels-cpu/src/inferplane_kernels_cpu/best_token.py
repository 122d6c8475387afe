"""The most likely token of each row of logits, natively."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from inferplane_kernels_cpu.native import int64, kernel, pointer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _kernel(dtype: torch.dtype, at: str | None) -> Callable[..., Any]:
    return kernel(
        f"best_token_{str(dtype).removeprefix('torch.')}", pointer, pointer, int64, int64, int64, at=at
    )


def best_token(logits: torch.Tensor, at: str | None = None) -> torch.Tensor:
    """Of ``logits: [n, vocab_size]`` in one of `DTYPES`. ``at``: the level of instructions.

    Returns ``[2, n]`` int64: the index of the largest, of equal ones the first, and below it 0; or 0 and below it 1 for
    a row that has something that is not a number, or whose largest is infinite.
    """
    n, vocab_size = logits.shape
    if vocab_size > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    out = torch.empty(2, n, dtype=torch.int64)
    _kernel(logits.dtype, at)(logits.data_ptr(), out.data_ptr(), n, vocab_size, logits.stride(0))
    return out
