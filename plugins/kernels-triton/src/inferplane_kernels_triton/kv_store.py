"""Writing keys and values of a step to the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.fp8_cache import (
    KVScales,
    check_scales,
    int8_of_heads,
    is_by_token,
    rounded,
    scaled,
    token_strides,
)
from inferplane_kernels_triton.launch import begin, options, require_unit_stride


@triton.jit
def _store_kv(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, k_scales_ptr, v_scales_ptr, k_token, k_head, v_token,
    v_head, cache_block, cache_slot, cache_head, scale_block, scale_slot, scale_head, num_kv_heads, head_dim,
    block_size,
    HAS_SCALES: tl.constexpr, HAS_TOKEN_SCALES: tl.constexpr, LIMIT: tl.constexpr, HEADS: tl.constexpr,
    DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program stores all heads of one token."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    columns = tl.arange(0, DIM)[None, :]
    mask = (heads < num_kv_heads) & (columns < head_dim)
    k = tl.load(k_ptr + token * k_token + heads * k_head + columns, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + token * v_token + heads * v_head + columns, mask=mask, other=0.0).to(tl.float32)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if HAS_TOKEN_SCALES:
        k_scales = int8_of_heads(tl.max(tl.abs(k), axis=1))[:, None]
        v_scales = int8_of_heads(tl.max(tl.abs(v), axis=1))[:, None]
        at = (slot // block_size) * scale_block + (slot % block_size) * scale_slot + heads * scale_head
        tl.store(k_scales_ptr + at, k_scales, mask=heads < num_kv_heads)
        tl.store(v_scales_ptr + at, v_scales, mask=heads < num_kv_heads)
        k, v = rounded(k / k_scales), rounded(v / v_scales)
    else:
        k = scaled(k, k_scales_ptr, heads, num_kv_heads, HAS_SCALES, LIMIT)
        v = scaled(v, v_scales_ptr, heads, num_kv_heads, HAS_SCALES, LIMIT)
    cell = (slot // block_size) * cache_block + (slot % block_size) * cache_slot
    cells = cell + heads * cache_head + columns
    tl.store(k_cache_ptr + cells, k.to(k_cache_ptr.dtype.element_ty), mask=mask)
    tl.store(v_cache_ptr + cells, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    kv_scales: KVScales | None = None,
    pdl: bool = False,
) -> None:
    """Writes ``k, v: [num_tokens, num_kv_heads, head_dim]`` to the slots of ``slot_mapping: [num_tokens]``.

    ``k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]``, views of any stride with a contiguous last
    dimension; a slot is ``block * block_size + offset``. With ``kv_scales`` the cache is of fp8,
    or of int8, whose scales are made and written here.
    """
    require_unit_stride(k=k, v=v, k_cache=k_cache, v_cache=v_cache)
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache and v_cache differ in strides: {k_cache.stride()} and {v_cache.stride()}")
    num_tokens, num_kv_heads, head_dim = k.shape
    check_scales(kv_scales, k_cache)
    k_scales, v_scales = kv_scales or (k, v)
    if num_tokens:
        _store_kv[(num_tokens,)](
            k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales, k.stride(0), k.stride(1),
            v.stride(0), v.stride(1), k_cache.stride(0), k_cache.stride(1), k_cache.stride(2),
            *token_strides(kv_scales), num_kv_heads, head_dim, k_cache.shape[1],
            HAS_SCALES=kv_scales is not None, HAS_TOKEN_SCALES=is_by_token(kv_scales),
            LIMIT=torch.finfo(k_cache.dtype).max if k_cache.is_floating_point() else 0,
            HEADS=triton.next_power_of_2(num_kv_heads), DIM=triton.next_power_of_2(head_dim), PDL=pdl,
            **options(pdl, num_warps=4),
        )  # fmt: skip
