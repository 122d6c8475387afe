"""Which experts a token goes to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride


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
