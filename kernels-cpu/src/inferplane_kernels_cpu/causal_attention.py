"""Causal attention without a cache by the native library: its paged attention over pages that are made for one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch.nn.functional import pad

from inferplane_kernels_cpu.native_attention import TILE, LayerShape, PagedAttention, Step, allocate_kv

PANEL = 16
"""Heads of a multiple of so many numbers are read where they lie."""


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_lens: Sequence[int],
    query_starts: torch.Tensor,
    key_lens: Sequence[int],
    key_starts: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of the last tokens of each sequence to themselves and all before them.

    ``q: [num_queries, num_heads, head_dim]``, ``k: [num_keys, num_kv_heads, head_dim]`` and ``v: [num_keys,
    num_kv_heads, value_dim]`` of one of the dtypes that the paged attention stores as they are; sequence i has
    ``query_lens[i]`` queries and ``key_lens[i]`` keys, which begin at ``query_starts[i]`` and ``key_starts[i]``, both
    ``[num_sequences + 1]`` int32. Returns a new tensor ``[num_queries, num_heads, value_dim]``.
    """
    value_dim = v.shape[2]
    dim = -(-max(q.shape[2], value_dim) // PANEL) * PANEL
    q, k, v = (x if x.shape[2] == dim else pad(x, (0, dim - x.shape[2])) for x in (q, k, v))
    num_pages, table, slots = _pages(key_lens)
    kv = allocate_kv(num_pages, k.shape[1], TILE, dim, k.dtype)
    step = Step(table, key_starts.diff(), query_starts, slots)
    kernel = _kernel(q.shape[1], k.shape[1], dim, scale, q.dtype)
    return kernel.attend(q, k, v, kv, step)[..., :value_dim]


def _pages(key_lens: Sequence[int]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """As many pages as each sequence fills, one after another: how many there are, a block table, each key's slot."""
    num_pages = [-(-length // TILE) for length in key_lens]
    first_pages = [sum(num_pages[:index]) for index in range(len(num_pages))]
    pages = torch.tensor(first_pages).unsqueeze(1) + torch.arange(max(num_pages))
    slots = [first * TILE + torch.arange(length) for first, length in zip(first_pages, key_lens)]
    return sum(num_pages), pages.int(), torch.cat(slots)


@cache
def _kernel(num_heads: int, num_kv_heads: int, dim: int, scale: float, dtype: torch.dtype) -> PagedAttention:
    shape = LayerShape(num_heads, num_kv_heads, dim, TILE, 0, 0, scale, 0.0, False)
    return PagedAttention(shape, dtype)
