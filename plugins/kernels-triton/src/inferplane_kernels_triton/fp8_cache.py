"""Numbers of a cache of one byte each: keys and values over the scale of their head (fp8) or of their own (int8).

Wherever kernels take ``kv_scales``, that is (scales of keys, scales of values), float32: ``[num_kv_heads]`` of fp8;
``[num_blocks, block_size, num_kv_heads]`` of int8, views of any strides, which storing fills in.
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


ROUNDING = tl.constexpr(12582912.0)
"""Added and taken off it rounds a float of up to 2 ** 22, halves to even."""


@triton.jit
def int8_of_heads(largest):
    """The scales of ``[heads]`` whose largest numbers these are: they become 127."""
    return tl.where(largest == 0.0, 1.0, largest / 127.0)


@triton.jit
def rounded(x):
    """To whole numbers, as int8."""
    return ((x + ROUNDING) - ROUNDING).to(tl.int8)


def is_by_token(kv_scales: KVScales | None) -> bool:
    return kv_scales is not None and kv_scales[0].dim() == 3


def token_strides(kv_scales: KVScales | None) -> tuple[int, int, int]:
    """Of a block, a slot and a head, where there is a scale for each token."""
    if kv_scales is None or not is_by_token(kv_scales):
        return 0, 0, 0
    block, slot, head = kv_scales[0].stride()
    return block, slot, head


def check_scales(kv_scales: KVScales | None, k_cache: torch.Tensor) -> None:
    """Raises ValueError where they are not of the cache's heads or, of int8, of its slots."""
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    is_int8 = k_cache.dtype == torch.int8
    shape = (num_blocks, block_size, num_kv_heads) if is_int8 else (num_kv_heads,)
    if is_int8 and kv_scales is None:
        raise ValueError("a cache of int8 needs kv_scales, one for each slot and head")
    for scales in kv_scales or ():
        if scales.shape != shape or scales.dtype != torch.float32:
            raise ValueError(
                f"scales of {num_kv_heads} KV heads are {list(shape)} float32, "
                f"not {list(scales.shape)} {scales.dtype}"
            )
    if is_int8 and kv_scales is not None and kv_scales[0].stride() != kv_scales[1].stride():
        raise ValueError("scales of keys and of values differ in strides")
