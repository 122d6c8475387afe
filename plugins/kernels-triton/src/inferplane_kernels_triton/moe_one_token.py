"""A mixture's experts for a single token, which are as fast as the weights of its few experts can be read.

Nothing is sorted: the pairs of token and expert are few, and each has its own rows of the first product. A program of
the second one goes through all pairs, so that their sum over the experts never leaves its registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.activation import gated_activation
from inferplane_kernels_triton.block_scale import PIECE, add_product
from inferplane_kernels_triton.launch import begin, options
from inferplane_kernels_triton.moe_codes import ExpertCodes, scale_starts, weight_arguments

MAX_STEPS = 32
"""Parts that a program reads at most. Its loops are unrolled, so that loads wait for nothing, and code has limits."""


@dataclass(frozen=True)
class OneTokenConfig:
    """How one of the two products is launched."""

    rows: int = 4
    """Rows of the weight in one program (pairs of rows in the gated product)."""
    columns: int = 1024
    """Columns that a program handles at a time."""
    num_warps: int = 4

    @classmethod
    def for_gate_and_up(cls) -> OneTokenConfig:
        return cls()

    @classmethod
    def for_down(cls) -> OneTokenConfig:
        """Its rows are short, and each program reads some of every expert."""
        return cls(rows=8, columns=256)

    def tile(self, width: int, num_experts: int) -> tuple[int, int]:
        """(rows, columns) for rows of ``width`` numbers of so many experts one after another: where these are long,
        more columns and fewer rows."""
        least = triton.next_power_of_2(triton.cdiv(width, max(1, MAX_STEPS // num_experts)))
        columns = max(PIECE.value, min(max(self.columns, least), triton.next_power_of_2(width)))
        return max(1, self.rows * min(self.columns, columns) // columns), columns


@triton.jit
def _gate_and_up(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, ids_ptr, weight_expert, weight_row, num_out, first_expert, alpha,
    limit,
    IN: tl.constexpr, NUM_EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr, HAS_SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program makes ROWS numbers of one pair."""
    pair = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_out
    begin(PDL)
    expert = tl.load(ids_ptr + pair) - first_expert
    if (expert >= 0) & (expert < NUM_EXPERTS):
        row_starts = expert.to(tl.int64) * weight_expert + rows.to(tl.int64)[:, None] * weight_row
        up_ptr = weight_ptr + tl.cast(num_out, tl.int64) * weight_row
        scales = 0
        up_scales = 0
        if HAS_SCALE:
            scales = scale_starts(expert, rows, 2 * num_out, IN, SCALE_ROWS, SCALE_COLUMNS)
            up_scales = scale_starts(expert, rows + num_out, 2 * num_out, IN, SCALE_ROWS, SCALE_COLUMNS)
        width: tl.constexpr = COLUMNS // PIECE if SCALE_COLUMNS > 0 else COLUMNS
        gate_acc = tl.zeros((ROWS, width), dtype=tl.float32)
        up_acc = tl.zeros((ROWS, width), dtype=tl.float32)
        for start in tl.static_range(0, IN, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            mask = row_mask[:, None] & (columns < IN)[None, :]
            cells = row_starts + columns[None, :]
            gate = tl.load(weight_ptr + cells, mask=mask, other=0.0, eviction_policy="evict_first")
            up = tl.load(up_ptr + cells, mask=mask, other=0.0, eviction_policy="evict_first")
            x = tl.load(x_ptr + columns, mask=columns < IN, other=0.0).to(tl.float32)[None, :]
            gate_acc = add_product(
                gate_acc, gate, x, scale_ptr, scales, row_mask, start, IN, HAS_SCALE, SCALE_COLUMNS, ROWS, COLUMNS
            )  # fmt: skip
            up_acc = add_product(
                up_acc, up, x, scale_ptr, up_scales, row_mask, start, IN, HAS_SCALE, SCALE_COLUMNS, ROWS, COLUMNS
            )  # fmt: skip
        gate_sum = tl.sum(gate_acc, axis=1)
        up_sum = tl.sum(up_acc, axis=1)
        if HAS_SCALE and SCALE_COLUMNS == 0:
            gate_sum *= tl.load(scale_ptr + scales, mask=row_mask, other=0.0)
            up_sum *= tl.load(scale_ptr + up_scales, mask=row_mask, other=0.0)
        if HAS_BIAS:
            biases = bias_ptr + expert * num_out * 2 + rows
            gate_sum += tl.load(biases, mask=row_mask, other=0.0).to(tl.float32)
            up_sum += tl.load(biases + num_out, mask=row_mask, other=0.0).to(tl.float32)
        made = gated_activation(gate_sum, up_sum, alpha, limit, ACTIVATION)
        tl.store(out_ptr + pair * num_out + rows, made.to(out_ptr.dtype.element_ty), mask=row_mask)


@triton.jit
def _down_and_sum(
    gated_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, ids_ptr, topk_weights_ptr, weight_expert, weight_row, num_out,
    first_expert,
    IN: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, HAS_SCALE: tl.constexpr,
    SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program makes ROWS numbers of the result. An expert elsewhere is read as the first one here, times 0."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_mask = rows < num_out
    begin(PDL)
    width: tl.constexpr = COLUMNS // PIECE if SCALE_COLUMNS > 0 else COLUMNS
    acc = tl.zeros((ROWS, width), dtype=tl.float32)
    biases = tl.zeros((ROWS,), dtype=tl.float32)
    for pair in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + pair) - first_expert
        is_here = (expert >= 0) & (expert < NUM_EXPERTS)
        share = tl.where(is_here, tl.load(topk_weights_ptr + pair), 0.0)
        expert = tl.where(is_here, expert, 0)
        row_starts = expert.to(tl.int64) * weight_expert + rows.to(tl.int64)[:, None] * weight_row
        scales = 0
        if HAS_SCALE:
            scales = scale_starts(expert, rows, num_out, IN, SCALE_ROWS, SCALE_COLUMNS)
        # an expert's only scale of a row multiplies what was summed up of this expert alone
        sums = tl.zeros((ROWS, width), dtype=tl.float32) if HAS_SCALE and SCALE_COLUMNS == 0 else acc
        for start in tl.static_range(0, IN, COLUMNS):
            columns = start + tl.arange(0, COLUMNS)
            mask = row_mask[:, None] & (columns < IN)[None, :]
            weight = tl.load(
                weight_ptr + row_starts + columns[None, :],
                mask=mask,
                other=0.0,
                eviction_policy="evict_first",
            )
            # what the first product did not write may be anything, so that a factor of 0 would not be enough
            gated = tl.load(gated_ptr + pair * IN + columns, mask=(columns < IN) & is_here, other=0.0)
            gated = (gated.to(tl.float32) * share)[None, :]
            sums = add_product(
                sums, weight, gated, scale_ptr, scales, row_mask, start, IN, HAS_SCALE, SCALE_COLUMNS, ROWS, COLUMNS
            )  # fmt: skip
        if HAS_SCALE and SCALE_COLUMNS == 0:
            acc += sums * tl.load(scale_ptr + scales, mask=row_mask, other=0.0)[:, None]
        else:
            acc = sums
        if HAS_BIAS:
            bias = tl.load(bias_ptr + expert * num_out + rows, mask=row_mask, other=0.0)
            biases += bias.to(tl.float32) * share
    total = tl.sum(acc, axis=1) + biases
    tl.store(out_ptr + rows, total.to(out_ptr.dtype.element_ty), mask=row_mask)


def experts_of_one_token(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor | ExpertCodes,
    w2: torch.Tensor | ExpertCodes,
    *,
    activation: str,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    first_expert: int,
    swiglu_alpha: float,
    swiglu_limit: float,
    configs: tuple[OneTokenConfig, OneTokenConfig],
    pdl: bool = False,
) -> torch.Tensor:
    """`fused_experts` for ``x: [1, hidden]``, whose arguments these are, checked already; ``configs`` are those of the
    product with gate and up, and of the one down."""
    top_k = topk_ids.shape[1]
    gate_up, down = weight_arguments(w13), weight_arguments(w2)
    num_experts, hidden, inner = down.numbers.shape
    (first_rows, first_columns), (rows, columns) = configs[0].tile(hidden, 1), configs[1].tile(inner, top_k)
    gated = torch.empty((top_k, inner), dtype=x.dtype, device=x.device)
    _gate_and_up[(triton.cdiv(inner, first_rows), top_k)](
        x, gate_up.numbers, gate_up.scale, w13_bias, gated, topk_ids, *gate_up.numbers.stride()[:2], inner,
        first_expert, swiglu_alpha, swiglu_limit,
        IN=hidden, NUM_EXPERTS=num_experts, ACTIVATION=activation, **gate_up.constants, HAS_BIAS=w13_bias is not None,
        ROWS=first_rows, COLUMNS=first_columns, PDL=pdl, **options(pdl, num_warps=configs[0].num_warps),
    )  # fmt: skip
    out = torch.empty((1, hidden), dtype=x.dtype, device=x.device)
    _down_and_sum[(triton.cdiv(hidden, rows),)](
        gated, down.numbers, down.scale, w2_bias, out, topk_ids, topk_weights, *down.numbers.stride()[:2], hidden,
        first_expert,
        IN=inner, TOP_K=top_k, NUM_EXPERTS=num_experts, **down.constants, HAS_BIAS=w2_bias is not None, ROWS=rows,
        COLUMNS=columns, PDL=pdl, **options(pdl, num_warps=configs[1].num_warps),
    )  # fmt: skip
    return out
