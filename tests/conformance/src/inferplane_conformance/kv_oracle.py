"""What a quantized cache makes of keys and values, from the definitions of its number types."""

from __future__ import annotations

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.kv import AttentionSpec, MLAAttentionSpec


def stored_numbers(
    layer: AttentionLayer, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``k, v: [num_tokens, num_kv_heads, head_dim]`` as they are read back; float64 where the cache is quantized."""
    spec, scales = layer.spec, layer.kv_scales
    assert isinstance(spec, AttentionSpec)
    if spec.dtype == "int8_per_token_head":
        stored_k, stored_v = int8_rows(k), int8_rows(v)
    elif scales is not None:
        exponent_bits = 4 if spec.dtype == "fp8_e4m3" else 5
        stored_k, stored_v = fp8(k, scales.k.cpu(), exponent_bits), fp8(v, scales.v.cpu(), exponent_bits)
    else:
        return k, v
    if isinstance(spec, MLAAttentionSpec):  # the values are a part of the keys
        stored_v = stored_k[..., : v.shape[-1]]
    return stored_k, stored_v


def fp8(x: torch.Tensor, scales: torch.Tensor, exponent_bits: int) -> torch.Tensor:
    """Each number over its head's scale as the nearest of fp8, and back. The nearest of what is too large is the
    largest; of two that are as near, the even one."""
    numbers = x.double() / scales.double().unsqueeze(1)
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    # of e4m3 the highest exponent is in use, but for the last mantissa, which is NaN; e5m2 is as IEEE 754 has it
    highest, full = (8, 2 - 2 * 2.0**-mantissa_bits) if exponent_bits == 4 else (15, 2 - 2.0**-mantissa_bits)
    exponent = numbers.abs().clamp(min=2.0**-40).log2().floor().clamp(min=1 - bias)
    step = torch.exp2(exponent - mantissa_bits)
    largest = full * 2.0**highest
    return ((numbers / step).round() * step).clamp(-largest, largest) * scales.double().unsqueeze(1)


def int8_rows(x: torch.Tensor) -> torch.Tensor:
    """The largest number of each token and head is 127 of its steps, which are a float32."""
    step = x.float().abs().amax(-1, keepdim=True) / 127
    numbers = torch.where(step == 0, 0.0, x.float() / step).round()
    return numbers.double() * step.double()
