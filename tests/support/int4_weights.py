"""Random weights of 4-bit codes, and what they mean in float64."""

from __future__ import annotations

import torch

from inferplane_kernels_triton.int4_matrix import Int4Matrix


def drawn_int4(
    out_features: int,
    in_features: int,
    group: int | None,
    device: torch.device,
    *,
    has_zero: bool = False,
    has_offset: bool = False,
    scale_dtype: torch.dtype = torch.float16,
) -> tuple[Int4Matrix, torch.Tensor]:
    """The matrix as packed, and ``[out_features, in_features]`` float64."""
    codes = torch.randint(0, 16, (out_features, in_features + in_features % 2), dtype=torch.uint8)
    size = group or in_features
    num_groups = -(-in_features // size)
    scale = (torch.rand(out_features, num_groups) + 0.5).to(scale_dtype) / 8
    zero = torch.randint(-8, 8, (out_features, num_groups), dtype=torch.int8) if has_zero else None
    offset = torch.randn(out_features, num_groups).to(scale_dtype) if has_offset else None

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.double().repeat_interleave(size, 1)[:, :in_features]

    wide = codes[:, :in_features].double() - 8
    if zero is not None:
        wide = wide - spread(zero)
    wide = wide * spread(scale)
    if offset is not None:
        wide = wide + spread(offset)
    packed = codes[:, ::2] | (codes[:, 1::2] << 4)
    parts = [None if each is None else each.to(device) for each in (scale, zero, offset)]
    return Int4Matrix.pack(packed.to(device), parts[0], in_features, group, *parts[1:]), wide.to(device)
