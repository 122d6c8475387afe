"""Which experts a token goes to, and the tokens of each expert side by side."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride

MAX_COMPARED = 2048
"""Up to so many pairs of token and expert each finds its place by comparing itself with all others."""


@triton.jit
def _topk_softmax(
    logits_ptr, weights_ptr, ids_ptr, logits_row, num_experts,
    TOP_K: tl.constexpr, RENORMALIZE: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program routes one token."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    inside = experts < num_experts
    logits = tl.load(logits_ptr + token * logits_row + experts, mask=inside, other=float("-inf")).to(
        tl.float32
    )
    exponents = tl.exp(logits - tl.max(logits, axis=0))
    rest = tl.where(inside, exponents / tl.sum(exponents, axis=0), -1.0)
    places = tl.arange(0, WIDTH)
    weights = tl.zeros((WIDTH,), dtype=tl.float32)
    ids = tl.zeros((WIDTH,), dtype=tl.int32)
    for place in tl.static_range(TOP_K):
        largest = tl.max(rest, axis=0)
        expert = tl.min(tl.where(rest == largest, experts, EXPERTS), axis=0)
        weights = tl.where(places == place, largest, weights)
        ids = tl.where(places == place, expert, ids)
        rest = tl.where(experts == expert, -1.0, rest)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, axis=0)
    tl.store(weights_ptr + token * TOP_K + places, weights, mask=places < TOP_K)
    tl.store(ids_ptr + token * TOP_K + places, ids, mask=places < TOP_K)


def topk_softmax(
    logits: torch.Tensor, top_k: int, renormalize: bool, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of each token and their softmax probabilities, largest first, of equal ones the lower id.

    ``logits: [num_tokens, num_experts]``. With ``renormalize`` each row's probabilities are divided by their sum.
    Returns ``(weights [num_tokens, top_k] float32, ids [num_tokens, top_k] int32)``.
    """
    require_unit_stride(logits=logits)
    num_tokens, num_experts = logits.shape
    weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits.device)
    if num_tokens:
        _topk_softmax[(num_tokens,)](
            logits, weights, ids, logits.stride(0), num_experts,
            TOP_K=top_k, RENORMALIZE=renormalize, EXPERTS=triton.next_power_of_2(num_experts),
            WIDTH=triton.next_power_of_2(top_k), PDL=pdl, **options(pdl, num_warps=1),
        )  # fmt: skip
    return weights, ids


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_by_expert(
    ids_ptr, order_ptr, starts_ptr, num_pairs, first_expert,
    NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program places BLOCK pairs, and finds where BLOCK experts start."""
    begin(PDL)
    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    others = tl.arange(0, PAIRS)
    id_of_mine = tl.load(ids_ptr + mine, mask=mine < num_pairs, other=-1) - first_expert
    id_of_others = tl.load(ids_ptr + others, mask=others < num_pairs, other=-1) - first_expert
    # Experts of other ranks, and what only fills up the block, come behind all of ours.
    id_of_mine = tl.where((id_of_mine >= 0) & (id_of_mine < NUM_EXPERTS), id_of_mine, NUM_EXPERTS)[:, None]
    id_of_others = tl.where((id_of_others >= 0) & (id_of_others < NUM_EXPERTS), id_of_others, NUM_EXPERTS)[
        None, :
    ]
    earlier = (id_of_others < id_of_mine) | ((id_of_others == id_of_mine) & (others[None, :] < mine[:, None]))
    tl.store(order_ptr + tl.sum(earlier.to(tl.int32), axis=1), mine, mask=mine < num_pairs)
    start = tl.sum((id_of_others < mine[:, None]).to(tl.int32), axis=1)
    tl.store(starts_ptr + mine, start, mask=mine <= NUM_EXPERTS)


def sort_by_expert(
    topk_ids: torch.Tensor, num_experts: int, first_expert: int = 0, *, pdl: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of token and expert, ordered by expert.

    ``topk_ids: [num_tokens, top_k]`` int32, contiguous. Returns ``order: [num_pairs]`` int32, indices into the flat
    ``topk_ids``, and ``starts: [num_experts + 1]`` int32: expert ``first_expert + e`` has ``order[starts[e]:starts[e +
    1]]``. Pairs of other experts stand behind ``starts[num_experts]``. Nothing is read back to the host.
    """
    num_pairs = topk_ids.numel()
    if num_pairs <= MAX_COMPARED:
        order = torch.empty(num_pairs, dtype=torch.int32, device=topk_ids.device)
        starts = torch.empty(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
        block = 16
        _sort_by_expert[(triton.cdiv(max(num_pairs, num_experts + 1), block),)](
            topk_ids, order, starts, num_pairs, first_expert,
            NUM_EXPERTS=num_experts, BLOCK=block, PAIRS=triton.next_power_of_2(max(1, num_pairs)), PDL=pdl,
            **options(pdl, num_warps=4),
        )  # fmt: skip
        return order, starts
    local = topk_ids.flatten() - first_expert
    local = torch.where((local >= 0) & (local < num_experts), local, num_experts)
    ids, order = torch.sort(local, stable=True)
    experts = torch.arange(num_experts + 1, dtype=torch.int32, device=topk_ids.device)
    return order.int(), torch.searchsorted(ids, experts, out_int32=True)
