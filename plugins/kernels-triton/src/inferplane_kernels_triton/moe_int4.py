"""One product of experts whose weights are 4-bit codes: tiles as in `moe_experts`, and blocks as in `int4_matmul`."""

from __future__ import annotations

import triton
import triton.language as tl

from inferplane_kernels_triton.activation import gated_activation
from inferplane_kernels_triton.int4_matmul import block_product
from inferplane_kernels_triton.launch import begin, begin_before_next
from inferplane_kernels_triton.moe_tile import tile_of_expert


@triton.jit
def int4_expert_product(
    x_ptr, words_ptr, scale_ptr, zero_ptr, offset_ptr, bias_ptr, out_ptr, order_ptr, starts_ptr, topk_weights_ptr,
    x_row, num_out, alpha, limit,
    IN: tl.constexpr, TOP_K: tl.constexpr, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, GATED: tl.constexpr,
    ACTIVATION: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """GATED: from a token's row of x to the pair's place in the order, by a gate's row and an up's by turns. Else: from
    there to the pair's row, weighted."""
    num_blocks: tl.constexpr = (IN + 127) // 128
    halves: tl.constexpr = 2 if GATED else 1
    if GATED:
        begin_before_next(PDL)
    # The sort was over before the product with gate and up let the other one start.
    expert, first, last = tile_of_expert(starts_ptr, tl.program_id(1), NUM_EXPERTS, EXPERTS, TOKENS)
    if not GATED:
        begin(PDL)
    if first < last:
        locals = tl.arange(0, ROWS)
        outs = tl.program_id(0) * (ROWS // halves) + locals // halves
        row_mask = outs < num_out
        rows = expert.to(tl.int64) * (num_out * halves) + outs + locals % halves * num_out
        places = first + tl.arange(0, TOKENS)
        exists = places < last
        pairs = tl.load(order_ptr + places, mask=exists, other=0).to(tl.int64)
        sources = pairs // TOP_K if GATED else places.to(tl.int64)
        targets = places.to(tl.int64) if GATED else pairs
        cells = rows[:, None] * (num_blocks * 16) + tl.arange(0, 16)[None, :]
        acc = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
        for block in tl.range(0, num_blocks, num_stages=STAGES):
            words = tl.load(words_ptr + cells + block * 16, mask=row_mask[:, None], other=0)
            acc = block_product(
                acc, words.to(tl.uint32, bitcast=True), x_ptr + sources[:, None] * x_row, exists[:, None], rows,
                row_mask, block, scale_ptr, zero_ptr, offset_ptr, IN, GROUP, E2M1, HAS_ZERO, HAS_OFFSET, ROWS, TOKENS,
            )  # fmt: skip
        if HAS_BIAS:
            acc += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)[:, None]
        result = acc
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (ROWS // 2, 2, TOKENS)), (0, 2, 1)))
            result = gated_activation(gate, up, alpha, limit, ACTIVATION)
        else:
            result *= tl.load(topk_weights_ptr + pairs, mask=exists, other=0.0)[None, :]
        made = tl.program_id(0) * (ROWS // halves) + tl.arange(0, ROWS // halves)
        out_cells = targets[None, :] * num_out + made[:, None]
        mask = (made < num_out)[:, None] & exists[None, :]
        tl.store(out_ptr + out_cells, result.to(out_ptr.dtype.element_ty), mask=mask)
