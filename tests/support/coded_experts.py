"""Random experts in eight bits, and what they mean in float64."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.moe_codes import ExpertCodes

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def drawn_experts(
    num_experts: int,
    out_features: int,
    in_features: int,
    block: tuple[int | None, int | None],
    device: torch.device,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> tuple[ExpertCodes, torch.Tensor]:
    """As the kernels take them, and ``[num_experts, out_features, in_features]`` float64, around 1 / √in_features.

    ``block``: rows and columns of one scale, None for all.
    """
    rows, columns = block[0] or out_features, block[1] or in_features
    drawn = torch.randn(num_experts, out_features, in_features) * 40
    codes = drawn.clamp(-127, 127).round().to(dtype) if dtype == torch.int8 else drawn.to(dtype)
    scale = torch.rand(num_experts, -(-out_features // rows), -(-in_features // columns)) + 0.5
    scale /= 40 * in_features**0.5
    spread = scale.double().repeat_interleave(rows, 1).repeat_interleave(columns, 2)
    numbers = codes.double() * spread[:, :out_features, :in_features]
    return ExpertCodes(codes.to(device), scale.to(device), rows, columns), numbers.to(device)
