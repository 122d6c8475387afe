"""One token of each row of logits, drawn natively."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from inferplane_kernels_cpu.native import boolean, int64, kernel, pointer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@cache
def _kernel(dtype: torch.dtype, at: str | None) -> Callable[..., Any]:
    name = f"draw_token_{str(dtype).removeprefix('torch.')}"
    return kernel(name, pointer, pointer, int64, int64, int64, pointer, pointer, boolean, at=at)


def draw_token(
    logits: torch.Tensor,
    floats: torch.Tensor,
    ints: torch.Tensor,
    has_top_k: bool = True,
    *,
    at: str | None = None,
) -> torch.Tensor:
    """Of ``logits: [n, vocab_size]`` in one of `DTYPES`, by ``floats: [3, n]`` float32 (temperature, top_p, min_p) and
    ``ints: [3, n]`` int32 (top_k, which counts if ``has_top_k``, and a key as two halves of 32 bits). ``at``: the level
    of instructions.

    Returns ``[2, n]`` int64: the tokens, and below each 0; or 0 and below it 1 for a row that leaves nothing to choose.
    """
    n, vocab_size = logits.shape
    if vocab_size > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    floats, ints = floats.contiguous(), ints.contiguous()
    out = torch.empty(2, n, dtype=torch.int64)
    draw = _kernel(logits.dtype, at)
    places = floats.data_ptr(), ints.data_ptr()
    draw(logits.data_ptr(), out.data_ptr(), n, vocab_size, logits.stride(0), *places, has_top_k)
    return out
