"""What attention kernels share: the softmax, and the loop over a range of cached keys for a tile of queries.

Softmax is computed online (arXiv:1805.02867) in base 2, in float32. float32 inputs are multiplied exactly ("ieee"),
never in tf32, so that greedy decoding picks the same tokens as a float32 reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped(scores, soft_cap, HAS_CAP: tl.constexpr):
    """``soft_cap * tanh(scores / soft_cap)`` where a model caps its logits."""
    if HAS_CAP:
        scores = soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))
    return scores


@triton.jit
def weigh(scores, largest):
    """A tile's scores in base 2, ``-inf`` where hidden, on top of what rows have seen: (weights, the factor on what was
    summed up before, the largest score so far)."""
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    # A row that has seen no key yet keeps -inf, and -inf - -inf is no number.
    base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
    return tl.exp2(scores - base[:, None]), tl.exp2(largest - base), new_largest


@triton.jit
def attend(
    q, acc, largest, total, positions, table_ptr, k_ptr, v_ptr, cache_block, cache_slot, k_scales_ptr, v_scales_ptr,
    scale_block, scale_slot, first, last, scale, soft_cap, window,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_TOKEN_SCALES: tl.constexpr, MASKED: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Goes over the keys ``first`` to ``last`` (``first`` a multiple of KEYS) and returns (acc, largest, total) anew.

    ``q: [rows, DIM]``, ``positions: [rows]`` of the queries in their sequence, ``acc: [rows, DIM]``, ``largest`` and
    ``total: [rows]``. ``k_ptr`` and ``v_ptr`` point to one KV head. MASKED applies causality and the window; without
    it every key up to ``last`` must be visible to every row, and ``last - first`` a multiple of KEYS. With
    HAS_TOKEN_SCALES each key and value has a scale, where ``k_scales_ptr`` and ``v_scales_ptr`` point for the head.
    """
    columns = tl.arange(0, DIM)
    offsets = tl.arange(0, KEYS)
    in_dim = columns < HEAD_DIM
    for start in tl.range(first, last, KEYS, num_stages=STAGES):
        keys = start + offsets
        exists = keys < last
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=exists, other=0).to(tl.int64)
        cells = blocks * cache_block + (keys % BLOCK_SIZE) * cache_slot
        loaded = exists[:, None] & in_dim[None, :]
        k = tl.load(k_ptr + cells[:, None] + columns[None, :], mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_TOKEN_SCALES:
            scale_cells = blocks * scale_block + (keys % BLOCK_SIZE) * scale_slot
            scores *= tl.load(k_scales_ptr + scale_cells, mask=exists, other=0.0)[None, :]
        scores = capped(scores, soft_cap, HAS_CAP) * LOG2_E
        if MASKED:
            visible = exists[None, :] & (keys[None, :] <= positions[:, None])
            if HAS_WINDOW:
                visible = visible & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        weights, shrink, largest = weigh(scores, largest)
        v = tl.load(v_ptr + cells[:, None] + columns[None, :], mask=loaded, other=0.0).to(q.dtype)
        total = total * shrink + tl.sum(weights, axis=1)
        if HAS_TOKEN_SCALES:
            weights *= tl.load(v_scales_ptr + scale_cells, mask=exists, other=0.0)[None, :]
        acc = tl.dot(weights.to(q.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, largest, total


@triton.jit
def finish(acc, largest, total, sinks, HAS_SINKS: tl.constexpr):
    """The attention output ``[rows, DIM]``: acc over the softmax denominator, which ``sinks: [rows]`` join."""
    if HAS_SINKS:
        sinks = sinks * LOG2_E
        new_largest = tl.maximum(largest, sinks)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.exp2(sinks - new_largest)
        acc = acc * shrink[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


def check_cache(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raises ValueError where queries and cache do not fit each other."""
    block_size, num_kv_heads, head_dim = k_cache.shape[1:]
    if k_cache.stride() != v_cache.stride() or k_cache.shape != v_cache.shape:
        raise ValueError(
            "k_cache and v_cache must be alike in shape and strides; take both as views of one tensor"
        )
    if q.shape[2] != head_dim or q.shape[1] % num_kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} heads of {q.shape[2]}, which does not fit {num_kv_heads} KV heads of {head_dim}"
        )
    if block_size < 16 or block_size & (block_size - 1):
        raise ValueError(f"block size {block_size}: needs a power of two from 16")
