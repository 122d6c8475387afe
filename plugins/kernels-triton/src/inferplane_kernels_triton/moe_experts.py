"""A mixture's experts: each token through its few gated feed-forward networks, summed by weight.

Pairs of token and expert stand side by side by expert. A program takes a tile of one expert's pairs and a tile of its
weight's rows; which expert it has follows from the counts, read from the device, so that a launch fits any routing. The
weight is the left operand, as in `skinny_matmul`: few tokens fall to an expert, and its rows are many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.activation import gated_activation
from inferplane_kernels_triton.launch import (
    SECTOR_BYTES,
    begin,
    begin_before_next,
    options,
    prefetch,
    require_unit_stride,
)
from inferplane_kernels_triton.moe_codes import ExpertCodes, scale_starts, weight_arguments
from inferplane_kernels_triton.moe_one_token import OneTokenConfig, experts_of_one_token
from inferplane_kernels_triton.moe_sort import sort_by_expert

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


@dataclass(frozen=True)
class ExpertsConfig:
    """How a product of many tokens is launched."""

    tokens: int = 16
    """Pairs of one expert in one program."""
    rows: int = 64
    """Rows of the weight (pairs of rows in the gated product)."""
    columns: int = 128
    num_warps: int = 4
    num_stages: int = 3
    prefetch: int = 0
    """Columns of the weight, in times of ``columns``, that a program asks for as soon as it knows its expert, where
    kernels start during the one before: 0 or a power of two."""

    @classmethod
    def default(cls, num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertsConfig:
        """Tiles of about what falls to an expert; float32 is multiplied without matrix units, so its are small."""
        if dtype == torch.float32:
            return cls(16, 32, 32, 4, 2)
        if num_pairs <= 32 * num_experts:
            return cls()
        return cls(64, 64, 64, 4, 3) if num_pairs <= 128 * num_experts else cls(128, 64, 64, 8, 3)


@triton.jit
def _tile_of_expert(starts_ptr, tile, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, TOKENS: tl.constexpr):
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


@triton.jit
def _add_dot(acc, weight, x, scales, row_mask, start, SCALE_COLUMNS: tl.constexpr):
    """Columns from ``start`` on, which share a scale where a row has several; its only one is left for the end."""
    weight = weight.to(x.dtype)
    if SCALE_COLUMNS > 0:
        scale = tl.load(scales + start // SCALE_COLUMNS, mask=row_mask, other=0.0)
        return acc + tl.dot(weight, x, input_precision="ieee") * scale[:, None]
    else:
        return tl.dot(weight, x, acc, input_precision="ieee")


@triton.jit
def _expert_product(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, order_ptr, starts_ptr, topk_weights_ptr, x_row, weight_expert,
    weight_row, num_out, alpha, limit,
    IN: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, HAS_SCALE: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr,
    HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GATED: from a token's row of x to the pair's place in the order. Else: from there to the pair's row, weighted."""
    if GATED:
        begin_before_next(PDL)
    # The sort was over before the product with gate and up let the other one start.
    expert, first, last = _tile_of_expert(starts_ptr, tl.program_id(1), NUM_EXPERTS, EXPERTS, TOKENS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    up_ptr = weight_ptr + tl.cast(num_out, tl.int64) * weight_row
    if PDL and PREFETCH > 0:  # noqa: SIM102 - constants, and values of the device
        if first < last:
            sector: tl.constexpr = SECTOR_BYTES * 8 // weight_ptr.dtype.element_ty.primitive_bitwidth
            sectors = tl.minimum(tl.arange(0, PREFETCH * COLUMNS // sector) * sector, IN - 1)
            ahead = expert.to(tl.int64) * weight_expert + sectors[None, :]
            ahead += tl.minimum(rows, num_out - 1).to(tl.int64)[:, None] * weight_row
            prefetch(weight_ptr + ahead)
            if GATED:
                prefetch(up_ptr + ahead)
    if not GATED:
        begin(PDL)
    if first < last:
        places = first + tl.arange(0, TOKENS)
        exists = places < last
        pairs = tl.load(order_ptr + places, mask=exists, other=0).to(tl.int64)
        sources = pairs // TOP_K if GATED else places.to(tl.int64)
        targets = places.to(tl.int64) if GATED else pairs
        row_mask = rows < num_out
        row_starts = expert.to(tl.int64) * weight_expert + rows.to(tl.int64)[:, None] * weight_row
        acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        up_acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        scales = scale_ptr
        up_scales = scale_ptr
        if HAS_SCALE:
            outs = 2 * num_out if GATED else num_out
            scales += scale_starts(expert, rows, outs, IN, SCALE_ROWS, SCALE_COLUMNS)
            up_scales += scale_starts(expert, rows + num_out, outs, IN, SCALE_ROWS, SCALE_COLUMNS)
        for start in tl.range(0, IN, COLUMNS, num_stages=STAGES):
            columns = (start + tl.arange(0, COLUMNS))[None, :]
            mask = row_mask[:, None] & (columns < IN)
            x_mask = exists[:, None] & (columns < IN)
            x = tl.trans(tl.load(x_ptr + sources[:, None] * x_row + columns, mask=x_mask, other=0.0))
            weight = tl.load(weight_ptr + row_starts + columns, mask=mask, other=0.0)
            acc = _add_dot(acc, weight, x, scales, row_mask, start, SCALE_COLUMNS)
            if GATED:
                up = tl.load(up_ptr + row_starts + columns, mask=mask, other=0.0)
                up_acc = _add_dot(up_acc, up, x, up_scales, row_mask, start, SCALE_COLUMNS)
        if HAS_SCALE and SCALE_COLUMNS == 0:
            acc *= tl.load(scales, mask=row_mask, other=0.0)[:, None]
            if GATED:
                up_acc *= tl.load(up_scales, mask=row_mask, other=0.0)[:, None]
        if HAS_BIAS:
            biases = bias_ptr + expert * num_out * (2 if GATED else 1) + rows
            acc += tl.load(biases, mask=row_mask, other=0.0).to(tl.float32)[:, None]
            if GATED:
                up_acc += tl.load(biases + num_out, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc = gated_activation(acc, up_acc, alpha, limit, ACTIVATION)
        else:
            acc *= tl.load(topk_weights_ptr + pairs, mask=exists, other=0.0)[None, :]
        cells = targets[None, :] * num_out + rows[:, None]
        tl.store(out_ptr + cells, acc.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & exists[None, :])


@triton.jit
def _combine(
    y_ptr, ids_ptr, out_ptr, dim, first_expert,
    NUM_EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds up BLOCK columns of one token's pairs; those of experts elsewhere were never written, and add nothing."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + place) - first_expert
        mask = (columns < dim) & (expert >= 0) & (expert < NUM_EXPERTS)
        acc += tl.load(y_ptr + (token * TOP_K + place) * dim + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * dim + columns, acc.to(out_ptr.dtype.element_ty), mask=columns < dim)


def fused_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor | ExpertCodes,
    w2: torch.Tensor | ExpertCodes,
    *,
    activation: str = "silu",
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    first_expert: int = 0,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    config: ExpertsConfig | None = None,
    down_config: ExpertsConfig | None = None,
    one_token: tuple[OneTokenConfig, OneTokenConfig] | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Each token through its experts, gated feed-forward networks, summed by its weights.

    ``x: [num_tokens, hidden]``, ``topk_weights: [num_tokens, top_k]`` float32, ``topk_ids: [num_tokens, top_k]`` int32,
    ``w13: [num_experts, 2 * inner, hidden]`` with the gate's rows first, ``w2: [num_experts, hidden, inner]``,
    ``w13_bias: [num_experts, 2 * inner]``, ``w2_bias: [num_experts, hidden]``, contiguous but for x. Codes of weights
    become numbers of x's dtype as they are loaded, and a block's rows end with those of the gate. The tensors hold the
    experts from ``first_expert`` on; an id of any other adds nothing. ``activation`` is one of `ACTIVATIONS`;
    ``swiglu_alpha`` and ``swiglu_limit`` belong to ``clamped_swiglu``. Returns a new ``[num_tokens, hidden]`` in x's
    dtype. Nothing is read back to the host.

    ``config`` is of the product with gate and up, ``down_config`` of the other one, by default the same. A single token
    has kernels of its own, with ``one_token`` for the two products, unless there is a ``config``.
    """
    gate_up, down = weight_arguments(w13), weight_arguments(w2)
    require_unit_stride(x=x, w13=gate_up.numbers, w2=down.numbers)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} should be one of {', '.join(ACTIVATIONS)}")
    num_tokens, top_k = topk_ids.shape
    num_experts, hidden, inner = down.numbers.shape
    num_pairs = num_tokens * top_k
    if num_tokens == 1 and config is None:
        return experts_of_one_token(
            x, topk_weights, topk_ids, w13, w2, activation=activation, w13_bias=w13_bias, w2_bias=w2_bias,
            first_expert=first_expert, swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit,
            configs=one_token or (OneTokenConfig.for_gate_and_up(), OneTokenConfig.for_down()), pdl=pdl,
        )  # fmt: skip
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    config = config or ExpertsConfig.default(num_pairs, num_experts, x.dtype)
    order, starts = sort_by_expert(topk_ids, num_experts, first_expert, pdl=pdl)
    gated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    weighted = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    for source, weight, bias, target, is_gated, tile in (
        (x, gate_up, w13_bias, gated, True, config),
        (gated, down, w2_bias, weighted, False, down_config or config),
    ):
        tiles = min(num_pairs, num_pairs // tile.tokens + num_experts)
        _expert_product[(triton.cdiv(target.shape[1], tile.rows), tiles)](
            source, weight.numbers, weight.scale, bias, target, order, starts, topk_weights, source.stride(0),
            *weight.numbers.stride()[:2], target.shape[1], swiglu_alpha, swiglu_limit,
            IN=weight.numbers.shape[2], TOP_K=top_k, NUM_EXPERTS=num_experts,
            EXPERTS=triton.next_power_of_2(num_experts), GATED=is_gated, ACTIVATION=activation, **weight.constants,
            HAS_BIAS=bias is not None, TOKENS=tile.tokens, ROWS=tile.rows, COLUMNS=weight.columns_of_tile(tile.columns),
            STAGES=tile.num_stages, PREFETCH=tile.prefetch, PDL=pdl, **options(pdl, num_warps=tile.num_warps),
        )  # fmt: skip
    block = min(1024, triton.next_power_of_2(hidden))
    _combine[(num_tokens, triton.cdiv(hidden, block))](
        weighted, topk_ids, out, hidden, first_expert,
        NUM_EXPERTS=num_experts, TOP_K=top_k, BLOCK=block, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return out
