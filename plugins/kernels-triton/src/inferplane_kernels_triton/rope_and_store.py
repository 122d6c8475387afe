"""All that lies between the packed projection and paged attention, in one launch.

Per-head norms of q and k where the model has them, rotation, and writing k and v to the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.fp8_cache import KVScales, check_scales, scaled
from inferplane_kernels_triton.launch import begin, options, require_unit_stride
from inferplane_kernels_triton.rotary import HEADS_PER_PROGRAM, rotate_heads


@triton.jit
def _rope_and_store(
    qkv_ptr, q_out_ptr, k_cache_ptr, v_cache_ptr, slots_ptr, positions_ptr, table_ptr, q_norm_ptr,
    k_norm_ptr, eps, k_scales_ptr, v_scales_ptr, qkv_token, cache_block, cache_slot, cache_head, table_row,
    num_heads, num_kv_heads, head_dim, rotary_dim, block_size,
    HAS_NORM: tl.constexpr, HAS_REST: tl.constexpr, HAS_SCALES: tl.constexpr, LIMIT: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program handles HEADS heads of one token: those of q first, then of k, then of v."""
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    position = tl.load(positions_ptr + token)
    begin(PDL)
    q_sections = tl.cdiv(num_heads, HEADS)
    kv_sections = tl.cdiv(num_kv_heads, HEADS)
    source = qkv_ptr + token * qkv_token
    cell = (slot // block_size) * cache_block + (slot % block_size) * cache_slot
    if section < q_sections + kv_sections:
        table = table_ptr + position * table_row
        if section < q_sections:
            rotate_heads(
                source, head_dim, q_out_ptr + token * num_heads * head_dim, head_dim, section * HEADS, num_heads,
                table, q_norm_ptr, eps, head_dim, rotary_dim, table, HAS_NORM, HAS_REST, False, 0.0, HEADS,
                HALF, REST,
            )  # fmt: skip
        else:
            rotate_heads(
                source + num_heads * head_dim, head_dim, k_cache_ptr + cell, cache_head,
                (section - q_sections) * HEADS, num_kv_heads, table, k_norm_ptr, eps, head_dim, rotary_dim,
                k_scales_ptr, HAS_NORM, HAS_REST, HAS_SCALES, LIMIT, HEADS, HALF, REST,
            )  # fmt: skip
    else:
        heads = (section - q_sections - kv_sections) * HEADS + tl.arange(0, HEADS)
        columns = tl.arange(0, DIM)
        mask = (heads < num_kv_heads)[:, None] & (columns < head_dim)[None, :]
        v_source = source + (num_heads + num_kv_heads) * head_dim + heads[:, None] * head_dim
        v = tl.load(v_source + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        v = scaled(v, v_scales_ptr, heads[:, None], num_kv_heads, HAS_SCALES, LIMIT)
        v_target = v_cache_ptr + cell + heads[:, None] * cache_head + columns[None, :]
        tl.store(v_target, v.to(v_cache_ptr.dtype.element_ty), mask=mask)


def rope_and_store(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    num_heads: int,
    *,
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None = None,
    kv_scales: KVScales | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Writes a step's keys (rotated) and values to the cache; returns the rotated queries.

    ``qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, q before k before v; ``k_cache, v_cache:
    [num_blocks, block_size, num_kv_heads, head_dim]``, views of any stride with a contiguous last dimension;
    ``slot_mapping: [num_tokens]`` integers ``block * block_size + offset``; ``positions: [num_tokens]`` integers;
    ``cos_sin: [max_positions, rotary_dim]`` with cosines in the first half. ``qk_norm`` is (weight of q, weight of k,
    eps), each weight ``[head_dim]``. With ``kv_scales`` the cache is of fp8.
    Returns ``out: [num_tokens, num_heads, head_dim]``, by default a new tensor. qkv is not changed.
    """
    require_unit_stride(qkv=qkv, k_cache=k_cache, v_cache=v_cache, cos_sin=cos_sin)
    num_tokens = len(qkv)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"k_cache and v_cache differ in strides: {k_cache.stride()} and {v_cache.stride()}")
    if qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_dim:
        raise ValueError(
            f"qkv has {qkv.shape[1]} columns, but {num_heads} query heads and twice {num_kv_heads} "
            f"KV heads of {head_dim} need {(num_heads + 2 * num_kv_heads) * head_dim}"
        )
    check_scales(kv_scales, k_cache)
    k_scales, v_scales = kv_scales or (cos_sin, cos_sin)
    rotary_dim = cos_sin.shape[1]
    q_norm, k_norm, eps = qk_norm or (cos_sin, cos_sin, 0.0)
    if out is None:
        out = torch.empty((num_tokens, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    sections = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    if num_tokens:
        _rope_and_store[(num_tokens, sections)](
            qkv, out, k_cache, v_cache, slot_mapping, positions, cos_sin, q_norm, k_norm, eps,
            k_scales, v_scales, qkv.stride(0), k_cache.stride(0), k_cache.stride(1),
            k_cache.stride(2), cos_sin.stride(0), num_heads, num_kv_heads, head_dim, rotary_dim, block_size,
            HAS_NORM=qk_norm is not None, HAS_REST=rotary_dim < head_dim, HAS_SCALES=kv_scales is not None,
            LIMIT=torch.finfo(k_cache.dtype).max, HEADS=heads,
            HALF=triton.next_power_of_2(rotary_dim // 2),
            REST=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
            DIM=triton.next_power_of_2(head_dim), PDL=pdl, **options(pdl, num_warps=2),
        )  # fmt: skip
    return out
