"""Many rows in fp8 times a weight with a scale for each block: prompts.

A tile of the result adds up one group of columns after another in the matrix unit, and both factors' scales multiply
each of these sums in float32. Tiles that run at the same time share rows of x, which stay in the second-level cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.block_scale import BlockScale, columns_of_tile, row_scales
from inferplane_kernels_triton.launch import begin, options, require_unit_stride
from inferplane_kernels_triton.quantize import X_GROUP, group_stride


@dataclass(frozen=True)
class BlockMatmulConfig:
    """How the kernel is launched."""

    tokens: int = 128
    rows: int = 128
    """Of the weight."""
    columns: int = 128
    together: int = 8
    """Tiles of tokens that go through the rows of the weight side by side."""
    num_warps: int = 8
    num_stages: int = 3

    @classmethod
    def default(cls, num_tokens: int, out_features: int) -> BlockMatmulConfig:
        """Tiles so small that there are enough of them to occupy a GPU."""
        tiles = triton.cdiv(num_tokens, 128) * triton.cdiv(out_features, 128)
        if tiles >= 256:
            return cls()
        return cls(tokens=64, num_warps=4) if tiles >= 64 else cls(tokens=64, rows=64, num_warps=4)


@triton.jit(do_not_specialize=["num_tokens", "x_scale_group"])
def _block_matmul(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, x_row, x_scale_group, weight_row, out_row, num_tokens,
    num_out,
    IN: tl.constexpr, SCALE_ROWS: tl.constexpr, SCALE_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program: TOKENS rows of x and ROWS rows of the weight. Beyond the last of either it reads the last."""
    begin(PDL)
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_out, ROWS)
    first_tile = program // (TOGETHER * row_tiles) * TOGETHER
    width = tl.minimum(TOGETHER, tl.cdiv(num_tokens, TOKENS) - first_tile)
    within = program % (TOGETHER * row_tiles)
    tokens = (first_tile + within % width) * TOKENS + tl.arange(0, TOKENS)
    first_row = within // width * ROWS
    rows = first_row + tl.arange(0, ROWS)
    x_tokens = tl.minimum(tokens, num_tokens - 1)
    weight_rows = tl.minimum(rows, num_out - 1)
    columns = tl.arange(0, COLUMNS)
    x_cells = x_ptr + x_tokens.to(tl.int64)[:, None] * x_row + columns[None, :]
    weight_cells = weight_ptr + weight_rows.to(tl.int64)[:, None] * weight_row + columns[None, :]
    if SCALE_ROWS % ROWS == 0:
        scales = scale_ptr + row_scales(0, first_row, IN, SCALE_ROWS, SCALE_COLUMNS)
    else:
        scales = scale_ptr + row_scales(0, weight_rows, IN, SCALE_ROWS, SCALE_COLUMNS)[None, :]
    acc = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in tl.range(0, IN, COLUMNS, num_stages=STAGES):
        if IN % COLUMNS == 0:
            x = tl.load(x_cells + start)
            weight = tl.load(weight_cells + start)
        else:
            inside = (columns < IN - start)[None, :]
            x = tl.load(x_cells + start, mask=inside, other=0.0)
            weight = tl.load(weight_cells + start, mask=inside, other=0.0)
        # before the product, so that it hides their way
        x_scale = tl.load(x_scale_ptr + start // X_GROUP * x_scale_group + x_tokens)[:, None]
        factor = x_scale * tl.load(scales + start // SCALE_COLUMNS)
        acc += tl.dot(x, tl.trans(weight)) * factor
    if HAS_BIAS:
        acc += tl.load(bias_ptr + weight_rows).to(tl.float32)[None, :]
    cells = tokens.to(tl.int64)[:, None] * out_row + rows[None, :]
    mask = (tokens < num_tokens)[:, None] & (rows < num_out)[None, :]
    tl.store(out_ptr + cells, acc.to(out_ptr.dtype.element_ty), mask=mask)


def block_matmul(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: BlockScale,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    config: BlockMatmulConfig | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight.T``, each group of 128 columns summed up by the matrix unit, and these sums in float32.

    ``x: [num_tokens, in_features]`` and ``weight: [out_features, in_features]`` float8_e4m3fn with contiguous rows,
    ``x_scale: [num_tokens, ceil(in_features / 128)]`` as of `quantize_per_token` by group, ``bias: [out_features]``.
    Returns ``out: [num_tokens, out_features]``, by default a new tensor of ``out_dtype``.
    """
    require_unit_stride(x=x, weight=weight)
    num_tokens, in_features = x.shape
    num_out = len(weight)
    if weight.shape[1] != in_features:
        raise ValueError(f"x has shape {tuple(x.shape)}, needs {weight.shape[1]} columns")
    scale_constants = weight_scale.constants(weight)
    x_scale_group = group_stride(x, x_scale)
    if out is None:
        out = torch.empty((num_tokens, num_out), dtype=out_dtype, device=x.device)
    if config is None:
        config = BlockMatmulConfig.default(num_tokens, num_out)
    columns = columns_of_tile(columns_of_tile(config.columns, X_GROUP.value), weight_scale.columns)
    if num_tokens:
        _block_matmul[(triton.cdiv(num_tokens, config.tokens) * triton.cdiv(num_out, config.rows),)](
            x, x_scale, weight, weight_scale.scale, bias, out, x.stride(0), x_scale_group, weight.stride(0),
            out.stride(0), num_tokens, num_out,
            IN=in_features, **scale_constants, HAS_BIAS=bias is not None, TOKENS=config.tokens, ROWS=config.rows,
            COLUMNS=columns, TOGETHER=config.together, STAGES=config.num_stages, PDL=pdl,
            **options(pdl, num_warps=config.num_warps),
        )  # fmt: skip
    return out
