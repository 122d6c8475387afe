"""Which pairs of token and expert a program has."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_of_expert(starts_ptr, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
    """(expert, first, last): the pairs of one tile; first ≥ last where all experts together have fewer tiles."""
    experts = tl.arange(0, EXPERTS)
    inside = experts < NUM_EXPERTS
    # around the first-level cache, which may still have an earlier layer's
    start = tl.load(starts_ptr + experts, mask=inside, other=0, cache_modifier=".cg")
    end = tl.load(starts_ptr + experts + 1, mask=inside, other=0, cache_modifier=".cg")
    tiles = (end - start + TOKENS - 1) // TOKENS
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    earlier = tl.sum(tl.where(experts < expert, tiles, 0), axis=0)
    first = tl.sum(tl.where(experts == expert, start, 0), axis=0) + (tile - earlier) * TOKENS
    last = tl.sum(tl.where(experts == expert, end, 0), axis=0)
    return expert, first, tl.minimum(last, first + TOKENS)
