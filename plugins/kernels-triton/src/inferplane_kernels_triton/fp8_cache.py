"""Numbers of an fp8 cache: keys and values over the scale of their head.

Wherever kernels take ``kv_scales``, that is (scales of keys, scales of values), each ``[num_kv_heads]`` float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

KVScales = tuple[torch.Tensor, torch.Tensor]


@triton.jit
def scaled(x, scales_ptr, heads, num_heads, HAS_SCALES: tl.constexpr, LIMIT: tl.constexpr):
    """``x: [heads, columns]`` float32 over the scales of ``heads: [heads, 1]``, within the range of the type."""
    if HAS_SCALES:
        x = x / tl.load(scales_ptr + heads, mask=heads < num_heads, other=1.0)
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    return x


def check_scales(kv_scales: KVScales | None, num_kv_heads: int) -> None:
    """Raises ValueError where they are not of the cache's heads."""
    for scales in kv_scales or ():
        if scales.shape != (num_kv_heads,) or scales.dtype != torch.float32:
            raise ValueError(
                f"scales of {num_kv_heads} KV heads are [{num_kv_heads}] float32, "
                f"not {list(scales.shape)} {scales.dtype}"
            )
