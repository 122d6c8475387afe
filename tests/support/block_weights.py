"""Drawn fp8 factors of a product: weights with a scale for each block, rows with one for each group of columns."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.block_scale import BlockScale
from kernel_checks import exact_in_fp8


def draw_blocks(
    out_features: int, in_features: int, rows: int, columns: int, device: torch.device
) -> tuple[torch.Tensor, BlockScale, torch.Tensor]:
    """The weight, its scales, and the numbers in float64, ``[out_features, in_features]``."""
    codes = exact_in_fp8(out_features, in_features, device=device)
    scale = torch.rand(-(-out_features // rows), -(-in_features // columns), device=device) + 0.1
    scale /= 20 * in_features**0.5
    spread = scale.double().repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    numbers = codes.double() * spread[:out_features, :in_features]
    return codes.to(torch.float8_e4m3fn), BlockScale(scale, rows, columns), numbers


def draw_rows(
    num_tokens: int, in_features: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows as `quantize_per_token` makes them by group: codes, scales, and the numbers in float64."""
    codes = exact_in_fp8(num_tokens, in_features, device=device)
    scale = torch.rand(-(-in_features // 128), num_tokens, device=device).T / 20 + 0.01
    numbers = codes.double() * scale.double().repeat_interleave(128, 1)[:, :in_features]
    return codes.to(torch.float8_e4m3fn), scale, numbers
