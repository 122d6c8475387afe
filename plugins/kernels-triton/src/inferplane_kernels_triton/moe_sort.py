"""The pairs of token and expert side by side by expert, whatever their number.

Few pairs find their places by comparing each with all others, in one launch. Many are counted by blocks: how many of
each expert a block has, which of an expert's pairs is the block's first one, and then each pair's place in its block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options

MAX_COMPARED = 2048
"""Up to so many pairs each compares itself with all others."""

BLOCK = 128
"""Pairs that are counted together."""

BLOCKS_AT_ONCE = 256
"""Blocks that are summed up in one go."""


@triton.jit
def _local(ids, first_expert, NUM_EXPERTS: tl.constexpr):
    """Experts of other ranks, and what only fills up a block, come behind all of ours."""
    local = ids - first_expert
    return tl.where((local >= 0) & (local < NUM_EXPERTS), local, NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _compare(
    ids_ptr, order_ptr, starts_ptr, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program places BLOCK pairs, and finds where BLOCK experts start."""
    begin(PDL)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    others = tl.arange(0, PAIRS)
    id_of_mine = tl.load(ids_ptr + mine, mask=mine < num_pairs, other=-1)
    id_of_others = tl.load(ids_ptr + others, mask=others < num_pairs, other=-1)
    id_of_mine = _local(id_of_mine, first_expert, NUM_EXPERTS)[:, None]
    id_of_others = _local(id_of_others, first_expert, NUM_EXPERTS)[None, :]
    earlier = (id_of_others < id_of_mine) | ((id_of_others == id_of_mine) & (others[None, :] < mine[:, None]))
    tl.store(order_ptr + tl.sum(earlier.to(tl.int32), axis=1), mine, mask=mine < num_pairs)
    start = tl.sum((id_of_others < mine[:, None]).to(tl.int32), axis=1)
    tl.store(starts_ptr + mine, start, mask=mine <= NUM_EXPERTS)


@triton.jit(do_not_specialize=["num_pairs"])
def _count(
    ids_ptr, counts_ptr, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program counts the pairs of one block by expert; those elsewhere are a class of their own."""
    begin(PDL)
    block = tl.program_id(0)
    pairs = block * BLOCK + tl.arange(0, BLOCK)
    ids = _local(tl.load(ids_ptr + pairs, mask=pairs < num_pairs, other=-1), first_expert, NUM_EXPERTS)
    tl.store(counts_ptr + block * CLASSES + tl.arange(0, CLASSES), tl.histogram(ids, CLASSES))


@triton.jit(do_not_specialize=["num_blocks"])
def _find_firsts(
    counts_ptr, firsts_ptr, totals_ptr, num_blocks, CLASSES: tl.constexpr, BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program finds which of an expert's pairs is the first one of each block."""
    begin(PDL)
    expert = tl.program_id(0)
    first = tl.full((), 0, tl.int32)
    for start in tl.range(0, num_blocks, BLOCKS):
        blocks = start + tl.arange(0, BLOCKS)
        mask = blocks < num_blocks
        counts = tl.load(counts_ptr + blocks * CLASSES + expert, mask=mask, other=0)
        tl.store(
            firsts_ptr + blocks * CLASSES + expert, first + tl.cumsum(counts, axis=0) - counts, mask=mask
        )
        first += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, first)


@triton.jit(do_not_specialize=["num_pairs"])
def _place(
    ids_ptr, firsts_ptr, totals_ptr, order_ptr, starts_ptr, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, CLASSES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program places the pairs of one block; the first one also says where each expert starts."""
    begin(PDL)
    block = tl.program_id(0)
    places = tl.arange(0, BLOCK)
    pairs = block * BLOCK + places
    inside = pairs < num_pairs
    ids = _local(tl.load(ids_ptr + pairs, mask=inside, other=-1), first_expert, NUM_EXPERTS)
    classes = tl.arange(0, CLASSES)
    totals = tl.load(totals_ptr + classes, mask=classes <= NUM_EXPERTS, other=0)
    if block == 0:
        tl.store(starts_ptr + classes, tl.cumsum(totals, axis=0) - totals, mask=classes <= NUM_EXPERTS)
    start = tl.sum(tl.where(classes[None, :] < ids[:, None], totals[None, :], 0), axis=1)
    first = tl.load(firsts_ptr + block * CLASSES + ids, mask=inside, other=0)
    # loaded once more, which is cheaper than turning a vector round
    others = _local(tl.load(ids_ptr + pairs, mask=inside, other=-1), first_expert, NUM_EXPERTS)
    earlier = (others[None, :] == ids[:, None]) & (places[None, :] < places[:, None])
    tl.store(order_ptr + start + first + tl.sum(earlier.to(tl.int32), axis=1), pairs, mask=inside)


def sort_by_expert(
    topk_ids: torch.Tensor, num_experts: int, first_expert: int = 0, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of token and expert, ordered by expert and among equal ones by token.

    ``topk_ids: [num_tokens, top_k]`` int32, contiguous. Returns ``order: [num_pairs]`` int32, indices into the flat
    ``topk_ids``, and ``starts: [num_experts + 1]`` int32: expert ``first_expert + e`` has ``order[starts[e]:starts[e +
    1]]``. Pairs of other experts stand behind ``starts[num_experts]``. Nothing is read back to the host.
    """
    num_pairs, device = topk_ids.numel(), topk_ids.device
    order = torch.empty(num_pairs, dtype=torch.int32, device=device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    if num_pairs <= MAX_COMPARED:
        block = 16
        _compare[(triton.cdiv(max(num_pairs, num_experts + 1), block),)](
            topk_ids, order, starts, num_pairs, first_expert,
            NUM_EXPERTS=num_experts, BLOCK=block, PAIRS=triton.next_power_of_2(max(1, num_pairs)), PDL=pdl,
            **options(pdl, num_warps=4),
        )  # fmt: skip
        return order, starts
    classes, num_blocks = triton.next_power_of_2(num_experts + 1), triton.cdiv(num_pairs, BLOCK)
    counts, firsts = torch.empty((2, num_blocks, classes), dtype=torch.int32, device=device)
    totals = torch.empty(classes, dtype=torch.int32, device=device)
    shared = {"NUM_EXPERTS": num_experts, "CLASSES": classes, "BLOCK": BLOCK, "PDL": pdl}
    launched = options(pdl, num_warps=4)
    _count[(num_blocks,)](topk_ids, counts, num_pairs, first_expert, **shared, **launched)
    _find_firsts[(num_experts + 1,)](
        counts, firsts, totals, num_blocks, CLASSES=classes, BLOCKS=BLOCKS_AT_ONCE, PDL=pdl, **launched
    )
    _place[(num_blocks,)](
        topk_ids,
        firsts,
        totals,
        order,
        starts,
        num_pairs,
        first_expert,
        **shared,
        **options(pdl, num_warps=8),
    )
    return order, starts
