"""A mixture's experts: each token through its few gated feed-forward networks, summed by weight.

Pairs of token and expert stand side by side by expert. A program takes a tile of one expert's pairs and a tile of its
weight's rows; which expert it has follows from the counts, read from the device, so that a launch fits any routing. The
weight is the left operand, as in `skinny_matmul`: few tokens fall to an expert, and its rows are many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.activation import gated_activation
from inferplane_kernels_triton.block_scale import add_dot
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.launch import (
    SECTOR_BYTES,
    begin,
    begin_before_next,
    options,
    prefetch,
    require_unit_stride,
)
from inferplane_kernels_triton.moe_codes import ExpertCodes, scale_starts, weight_arguments
from inferplane_kernels_triton.moe_int4 import int4_expert_product
from inferplane_kernels_triton.moe_one_token import OneTokenConfig, experts_of_one_token
from inferplane_kernels_triton.moe_sort import sort_by_expert
from inferplane_kernels_triton.moe_tile import tile_of_expert

ExpertsWeight: TypeAlias = torch.Tensor | ExpertCodes | Int4Matrix
"""``[num_experts, out, in]``: plain, in codes of a byte, or of four bits, where experts lie one below another."""

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

    @classmethod
    def for_four_bits(cls, num_pairs: int, num_experts: int) -> ExpertsConfig:
        """A program that is large and decodes as well has more in its registers than there are."""
        return cls() if num_pairs <= 32 * num_experts else cls(64, 64, 64, 4, 3)


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
    expert, first, last = tile_of_expert(starts_ptr, tl.program_id(1), NUM_EXPERTS, EXPERTS, TOKENS)
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
            acc = add_dot(acc, weight, x, scales, 1.0, row_mask, start, SCALE_COLUMNS)
            if GATED:
                up = tl.load(up_ptr + row_starts + columns, mask=mask, other=0.0)
                up_acc = add_dot(up_acc, up, x, up_scales, 1.0, row_mask, start, SCALE_COLUMNS)
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
    w13: ExpertsWeight,
    w2: ExpertsWeight,
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
    has kernels of its own, with ``one_token`` for the two products, unless there is a ``config`` or codes are of four
    bits, of which x is in half precision.
    """
    require_unit_stride(x=x)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} should be one of {', '.join(ACTIVATIONS)}")
    num_tokens, top_k = topk_ids.shape
    num_experts, hidden, inner = sizes(w2, x.shape[1])
    num_pairs = num_tokens * top_k
    if (
        num_tokens == 1
        and config is None
        and not isinstance(w13, Int4Matrix)
        and not isinstance(w2, Int4Matrix)
    ):
        return experts_of_one_token(
            x, topk_weights, topk_ids, w13, w2, activation=activation, w13_bias=w13_bias, w2_bias=w2_bias,
            first_expert=first_expert, swiglu_alpha=swiglu_alpha, swiglu_limit=swiglu_limit,
            configs=one_token or (OneTokenConfig.for_gate_and_up(), OneTokenConfig.for_down()), pdl=pdl,
        )  # fmt: skip
    out = torch.empty((num_tokens, hidden), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    if config is None:
        has_four_bits = isinstance(w13, Int4Matrix) or isinstance(w2, Int4Matrix)
        config = (
            ExpertsConfig.for_four_bits(num_pairs, num_experts)
            if has_four_bits
            else ExpertsConfig.default(num_pairs, num_experts, x.dtype)
        )
    order, starts = sort_by_expert(topk_ids, num_experts, first_expert, pdl=pdl)
    gated = torch.empty((num_pairs, inner), dtype=x.dtype, device=x.device)
    weighted = torch.empty((num_pairs, hidden), dtype=x.dtype, device=x.device)
    gate, routing = (activation, swiglu_alpha, swiglu_limit), (order, starts, topk_weights)
    for source, weight, bias, target, is_gated, tile in (
        (x, w13, w13_bias, gated, True, config),
        (gated, w2, w2_bias, weighted, False, down_config or config),
    ):
        _launch_product(
            source, weight, bias, target, routing, num_experts, gate, tile, is_gated=is_gated, pdl=pdl
        )
    block = min(1024, triton.next_power_of_2(hidden))
    _combine[(num_tokens, triton.cdiv(hidden, block))](
        weighted, topk_ids, out, hidden, first_expert,
        NUM_EXPERTS=num_experts, TOP_K=top_k, BLOCK=block, PDL=pdl, **options(pdl, num_warps=4),
    )  # fmt: skip
    return out


def _launch_product(
    source: torch.Tensor,
    weight: ExpertsWeight,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    routing: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_experts: int,
    gate: tuple[str, float, float],
    config: ExpertsConfig,
    *,
    is_gated: bool,
    pdl: bool,
) -> None:
    """``routing``: order and starts of the sorted pairs, and the router's weights. ``gate``: the activation with its
    two numbers."""
    num_pairs, width = target.shape
    activation, alpha, limit = gate
    tiles = min(num_pairs, num_pairs // config.tokens + num_experts)
    grid = (triton.cdiv(width, config.rows), tiles)
    shared: dict[str, Any] = {
        "TOP_K": routing[2].shape[1], "NUM_EXPERTS": num_experts, "EXPERTS": triton.next_power_of_2(num_experts),
        "GATED": is_gated, "ACTIVATION": activation, "HAS_BIAS": bias is not None, "TOKENS": config.tokens,
        "STAGES": config.num_stages, "PDL": pdl, **options(pdl, num_warps=config.num_warps),
    }  # fmt: skip
    if isinstance(weight, Int4Matrix):
        int4_expert_product[grid](
            source, weight.words, weight.scale, weight.zero, weight.offset, bias, target, *routing, source.stride(0),
            width, alpha, limit,
            IN=weight.in_features, GROUP=weight.group, E2M1=weight.is_e2m1, HAS_ZERO=weight.zero is not None,
            HAS_OFFSET=weight.offset is not None, ROWS=config.rows * (2 if is_gated else 1), **shared,
        )  # fmt: skip
        return
    arguments = weight_arguments(weight)
    _expert_product[grid](
        source, arguments.numbers, arguments.scale, bias, target, *routing, source.stride(0),
        *arguments.numbers.stride()[:2], width, alpha, limit,
        IN=arguments.numbers.shape[2], **arguments.constants, ROWS=config.rows,
        COLUMNS=arguments.columns_of_tile(config.columns), PREFETCH=config.prefetch, **shared,
    )  # fmt: skip


def sizes(down: ExpertsWeight, hidden: int) -> tuple[int, int, int]:
    """Experts, hidden and inner size by the weight of the product down."""
    if isinstance(down, Int4Matrix):
        return down.out_features // hidden, hidden, down.in_features
    num_experts, hidden, inner = (down.codes if isinstance(down, ExpertCodes) else down).shape
    return num_experts, hidden, inner
