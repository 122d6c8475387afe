"""Products of fp8 numbers by NVIDIA's matrix units (from capability 8.9), through torch's own kernels."""

from __future__ import annotations

import torch


def scaled_linear(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """``(x * x_scale) @ (weight * weight_scale).T`` in ``dtype``, summed in float32.

    ``x: [num_tokens, in_features]`` and ``weight: [out_features, in_features]`` float8_e4m3fn, contiguous, with
    ``x_scale: [num_tokens, 1]`` and ``weight_scale: [out_features, 1]`` float32. Both feature counts are multiples of
    16; ValueError names the one that is not. ``dtype`` is bfloat16: torch has no other with a scale for each row.
    """
    for name, size in (("in_features", weight.shape[1]), ("out_features", weight.shape[0])):
        if size % 16:
            raise ValueError(
                f"{name} is {size}, needs a multiple of 16; pad the weight or multiply in {dtype}"
            )
    return torch._scaled_mm(x, weight.t(), scale_a=x_scale, scale_b=weight_scale.t(), out_dtype=dtype)
