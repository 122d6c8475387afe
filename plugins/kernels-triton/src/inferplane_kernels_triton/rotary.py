"""Rotary position embedding (arXiv:2104.09864), half-split pairing, over the first ``rotary_dim`` of each head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.fp8_cache import scaled
from inferplane_kernels_triton.launch import begin, options, require_unit_stride

HEADS_PER_PROGRAM = 8


@triton.jit
def _rms_scale(first, second, rest, head_dim, eps):
    """``1 / sqrt(mean(x²) + eps)`` of each head, whose parts are ``[heads, ·]`` float32."""
    total = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1) + tl.sum(rest * rest, axis=1)
    return tl.rsqrt(total / head_dim + eps)[:, None]


@triton.jit
def _normed(x, scale, weight_ptr, columns, mask, dtype: tl.constexpr):
    """Weighted norm, with the roundings of a norm that is a kernel of its own."""
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    return (weight[None, :] * (x * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)


@triton.jit
def rotate_heads(
    in_ptr, in_head, out_ptr, out_head, first_head, num_heads, table_ptr, norm_ptr, eps, head_dim,
    rotary_dim, scales_ptr,
    HAS_NORM: tl.constexpr, HAS_REST: tl.constexpr, HAS_SCALES: tl.constexpr, LIMIT: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Norms (optional) and rotates HEADS heads of one token, and writes them, with HAS_SCALES as an fp8 cache has them.

    ``table_ptr`` is the token's row of cosines and sines.
    """
    dtype = in_ptr.dtype.element_ty
    half = rotary_dim // 2
    heads = first_head + tl.arange(0, HEADS)
    pair = tl.arange(0, HALF)
    left = rotary_dim + tl.arange(0, REST)
    pair_mask = (heads < num_heads)[:, None] & (pair < half)[None, :]
    rest_mask = (heads < num_heads)[:, None] & (left < head_dim)[None, :]
    source = in_ptr + heads[:, None] * in_head
    target = out_ptr + heads[:, None] * out_head
    first = tl.load(source + pair[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    second = tl.load(source + half + pair[None, :], mask=pair_mask, other=0.0).to(tl.float32)
    cos = tl.load(table_ptr + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(table_ptr + half + pair, mask=pair < half, other=0.0).to(tl.float32)[None, :]
    rest = tl.zeros((HEADS, REST), dtype=tl.float32)
    if HAS_REST:
        rest = tl.load(source + left[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = _rms_scale(first, second, rest, head_dim, eps)
        first = _normed(first, scale, norm_ptr, pair, pair < half, dtype)
        second = _normed(second, scale, norm_ptr, half + pair, pair < half, dtype)
        if HAS_REST:
            rest = _normed(rest, scale, norm_ptr, left, left < head_dim, dtype)
    out_dtype = out_ptr.dtype.element_ty
    turned_first = scaled(
        first * cos - second * sin, scales_ptr, heads[:, None], num_heads, HAS_SCALES, LIMIT
    )
    turned_second = scaled(
        second * cos + first * sin, scales_ptr, heads[:, None], num_heads, HAS_SCALES, LIMIT
    )
    tl.store(target + pair[None, :], turned_first.to(out_dtype), mask=pair_mask)
    tl.store(target + half + pair[None, :], turned_second.to(out_dtype), mask=pair_mask)
    if HAS_REST:
        rest = scaled(rest, scales_ptr, heads[:, None], num_heads, HAS_SCALES, LIMIT)
        tl.store(target + left[None, :], rest.to(out_dtype), mask=rest_mask)


@triton.jit
def _rotary(
    q_ptr, k_ptr, positions_ptr, table_ptr, q_token, q_head, k_token, k_head, table_row, num_heads,
    num_kv_heads, head_dim, rotary_dim,
    HEADS: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program turns HEADS heads of one token; the programs of q come first, then those of k."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    section = tl.program_id(1)
    table = table_ptr + tl.load(positions_ptr + token) * table_row
    q_sections = tl.cdiv(num_heads, HEADS)
    if section < q_sections:
        q = q_ptr + token * q_token
        rotate_heads(
            q, q_head, q, q_head, section * HEADS, num_heads, table, table, 0.0, head_dim, rotary_dim,
            table, False, False, False, 0.0, HEADS, HALF, 1,
        )  # fmt: skip
    else:
        k = k_ptr + token * k_token
        rotate_heads(
            k, k_head, k, k_head, (section - q_sections) * HEADS, num_kv_heads, table, table, 0.0, head_dim,
            rotary_dim, table, False, False, False, 0.0, HEADS, HALF, 1,
        )  # fmt: skip


def rotary(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotates q and k in place, computed in float32, and returns them.

    ``q: [num_tokens, num_heads, head_dim]`` and ``k: [num_tokens, num_kv_heads, head_dim]`` may be views of a packed
    projection; ``positions: [num_tokens]`` integers; ``cos_sin: [max_positions, rotary_dim]`` with cosines in the
    first half.
    """
    require_unit_stride(q=q, k=k, cos_sin=cos_sin)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, rotary_dim = k.shape[1], cos_sin.shape[1]
    heads = min(HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    if num_tokens:
        _rotary[(num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))](
            q, k, positions, cos_sin, q.stride(0), q.stride(1), k.stride(0), k.stride(1), cos_sin.stride(0),
            num_heads, num_kv_heads, head_dim, rotary_dim,
            HEADS=heads, HALF=triton.next_power_of_2(rotary_dim // 2), PDL=pdl, **options(pdl, num_warps=2),
        )  # fmt: skip
    return q, k
