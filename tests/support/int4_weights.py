"""Random weights of 4-bit codes, and what they mean in float64."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.int4_matrix import Int4Matrix

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def drawn_int4(
    out_features: int,
    in_features: int,
    group: int | None,
    device: torch.device,
    *,
    has_zero: bool = False,
    has_offset: bool = False,
    is_e2m1: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[Int4Matrix, torch.Tensor]:
    """The matrix as packed, and ``[out_features, in_features]`` float64. E2M1 has powers of two for scales."""
    codes = torch.randint(0, 16, (out_features, in_features + in_features % 2), dtype=torch.uint8)
    size = group or in_features
    num_groups = -(-in_features // size)
    scale = (torch.rand(out_features, num_groups) + 0.5).to(scale_dtype) / 8
    if is_e2m1:
        scale = torch.exp2(torch.randint(-5, 0, scale.shape).float()).to(torch.float8_e8m0fnu)
    zero = torch.randint(-8, 8, (out_features, num_groups), dtype=torch.int8) if has_zero else None
    offset = torch.randn(out_features, num_groups).to(scale_dtype) if has_offset else None

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float().double().repeat_interleave(size, 1)[:, :in_features]

    wide = codes[:, :in_features].double() - 8
    if is_e2m1:
        wide = torch.tensor([*E2M1, *(-each for each in E2M1)], dtype=torch.float64)[
            codes[:, :in_features].int()
        ]
    if zero is not None:
        wide = wide - spread(zero)
    wide = wide * spread(scale)
    if offset is not None:
        wide = wide + spread(offset)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    parts = [None if each is None else each.to(device) for each in (scale, zero, offset)]
    matrix = Int4Matrix.pack(packed.to(device), parts[0], in_features, group, *parts[1:], is_e2m1=is_e2m1)
    return matrix, wide.to(device)
