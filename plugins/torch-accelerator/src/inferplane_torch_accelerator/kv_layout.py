"""How keys and values lie in memory: one layout for every backend of a platform.

``[2, num_blocks, block_size, num_kv_heads, head_dim]``, keys before values: each half is what FlashAttention takes as a
cache with a block table, and a slot is one row of ``num_kv_heads * head_dim`` contiguous elements. Latents, which are
keys and values at once, have one half; ``kv[0]`` and ``kv[-1]`` are keys and values either way.

Of int8 it is ``[2, num_blocks, bytes]``: a block's numbers in that order, and behind them a float32 scale for each of
its slots and heads.
"""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.kv import MLAAttentionSpec


def allocate(
    layer: AttentionLayer, num_blocks: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Zeros, because kernels multiply by whole tiles: a masked weight is 0, and 0 times a NaN would be one."""
    halves = 1 if isinstance(layer.spec, MLAAttentionSpec) else 2
    if dtype == torch.int8:
        return torch.zeros((halves, num_blocks, layer.spec.block_bytes // halves), dtype=dtype, device=device)
    shape = (halves, num_blocks, layer.spec.block_size, layer.num_kv_heads, layer.head_dim)
    return torch.zeros(shape, dtype=dtype, device=device)


def store(k: torch.Tensor, v: torch.Tensor, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Writes one row of k and v, ``[num_tokens, num_kv_heads, head_dim]``, into each slot ``[num_tokens]`` int64; of
    latents k alone."""
    slots = kv.flatten(1, 2)
    slots[0].index_copy_(0, slot_mapping, k)
    if kv.shape[0] == 2:
        slots[1].index_copy_(0, slot_mapping, v)


def numbers_and_scales(half: torch.Tensor, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """``[num_blocks, block_size, num_kv_heads, head_dim]`` int8 and ``[num_blocks, block_size, num_kv_heads]`` float32
    of keys or of values."""
    slots = (layer.spec.block_size, layer.num_kv_heads)
    numbers, scales = half.split(
        [half.shape[1] // (layer.head_dim + 4) * size for size in (layer.head_dim, 4)], 1
    )
    return numbers.unflatten(1, (*slots, layer.head_dim)), scales.view(torch.float32).unflatten(1, slots)
