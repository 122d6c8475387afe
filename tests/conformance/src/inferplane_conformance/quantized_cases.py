"""Random quantized weights of each scheme, and the numbers that they stand for, from the scheme's own definition."""

from __future__ import annotations

from dataclasses import fields, replace

import torch

from inferplane.api import DeviceRuntime
from inferplane.api.quantized_weight import (
    CHANNEL,
    FLOAT8,
    TABLES,
    TENSOR,
    Activation,
    Granularity,
    Number,
    QuantizedWeight,
    QuantScheme,
    pack_nibbles,
)

INT8 = QuantScheme(Number.INT, 8, CHANNEL, torch.float32)
INT4 = QuantScheme(Number.INT, 4, Granularity(1, 32), torch.bfloat16)
FP8 = QuantScheme(
    Number.FP8_E4M3, 8, CHANNEL, torch.float32,
    activation=Activation.DYNAMIC_TOKEN, activation_number=Number.FP8_E4M3,
)  # fmt: skip

SCHEMES = {
    "int4 by 32": INT4,
    "int4 by 64 with zero points": replace(INT4, granularity=Granularity(1, 64), is_symmetric=False),
    "int4 by 32 in any order": replace(INT4, has_column_order=True),
    "int4 by 32 with offsets": replace(INT4, has_offset=True),
    "int4 by channel": replace(INT4, granularity=CHANNEL),
    "int3 by 32": replace(INT4, bits=3),
    "int8 by channel": INT8,
    "int8 by channel with tokens": replace(
        INT8, activation=Activation.DYNAMIC_TOKEN, activation_number=Number.INT
    ),
    "int8 by 128 with zero points": replace(INT8, granularity=Granularity(1, 128), is_symmetric=False),
    "e4m3 by channel with tokens": FP8,
    "e4m3 with tokens": replace(FP8, granularity=TENSOR),
    "e4m3 with a static scale": replace(FP8, granularity=TENSOR, activation=Activation.STATIC_TENSOR),
    "e4m3 by 128×128 with groups": replace(
        FP8, granularity=Granularity(128, 128), activation=Activation.DYNAMIC_GROUP
    ),
    "e4m3 by channel": replace(FP8, activation=Activation.NONE, activation_number=None),
    "e5m2 by channel": QuantScheme(Number.FP8_E5M2, 8, CHANNEL, torch.float32),
    "mxfp4": QuantScheme(Number.FP4, 4, Granularity(1, 32), torch.float8_e8m0fnu),
    "nf4 by 64": QuantScheme(Number.NF4, 4, Granularity(1, 64), torch.float32),
    "table of 16 by 64": QuantScheme(Number.TABLE4, 4, Granularity(1, 64), torch.float32),
}


def draw(
    scheme: QuantScheme, out_features: int, in_features: int, generator: torch.Generator
) -> tuple[QuantizedWeight, torch.Tensor]:
    """In host memory, and ``[out_features, in_features]`` float64. Outputs of unit inputs are of the order of 1."""
    size = (out_features, in_features)
    codes, values, table = _codes(scheme, size, generator)
    blocks = scheme.granularity.scale_shape(*size)
    spread = values.double().std() * in_features**0.5
    if scheme.scale_dtype == torch.float8_e8m0fnu:
        scale = torch.exp2(torch.randint(-1, 2, blocks, generator=generator) - spread.log2().round())
    else:
        scale = (torch.rand(blocks, generator=generator) + 0.5) / spread
    scale = scale.to(scheme.scale_dtype)
    zero = None
    if not scheme.is_symmetric:
        zero = torch.randint(-3, 4, blocks, generator=generator, dtype=torch.int8)
    column_group = None
    if scheme.has_column_order:
        group_size = scheme.granularity.columns or in_features
        order = torch.randperm(in_features, generator=generator)
        column_group = (torch.arange(in_features) // group_size)[order].int()
    offset = None
    if scheme.has_offset:
        offset = (scale.float() * torch.randn(blocks, generator=generator) * 4).to(scale.dtype)
    weight = QuantizedWeight(scheme, *size, codes, scale, zero, column_group, table=table, offset=offset)

    rows = torch.arange(out_features) // (scheme.granularity.rows or out_features)
    columns = torch.arange(in_features) // (scheme.granularity.columns or in_features)
    block = rows.unsqueeze(1), columns if column_group is None else column_group.long()
    numbers = values.double()
    if zero is not None:
        numbers = numbers - zero.double()[block]
    numbers = numbers * scale.double()[block]
    return weight, numbers if offset is None else numbers + offset.double()[block]


def _codes(
    scheme: QuantScheme, size: tuple[int, int], generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As they are stored, what each stands for before zero point and scale, and the table that the weight brings."""
    if scheme.number in FLOAT8:
        largest = torch.finfo(FLOAT8[scheme.number]).max
        drawn = torch.randn(size, generator=generator) * (largest / 4)
        values = drawn.clamp(-largest, largest).to(FLOAT8[scheme.number])
        return values, values, None
    if scheme.number is Number.INT:
        half = 2 ** (scheme.bits - 1)
        values = torch.randint(-half, half, size, generator=generator, dtype=torch.int8)
        return pack_nibbles(values + 8) if scheme.is_packed else values, values, None
    codes = torch.randint(0, 16, size, generator=generator)
    if scheme.number is Number.TABLE4:
        table = torch.randn(16, generator=generator)
        return pack_nibbles(codes), table[codes], table
    return pack_nibbles(codes), torch.tensor(TABLES[scheme.number])[codes], None


def on_device(weight: QuantizedWeight, runtime: DeviceRuntime) -> QuantizedWeight:
    tensors = {each.name: getattr(weight, each.name) for each in fields(weight)}
    copies = {
        name: runtime.to_device(value) for name, value in tensors.items() if isinstance(value, torch.Tensor)
    }
    return replace(weight, **copies)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""Of the sum of the products' absolute values: weight, activation and result are each rounded to the type."""


def declared_rounding(dtype: torch.dtype, activation_bits: int | None) -> float:
    """Half a step of whole numbers of so many bits, one of them the sign, for activations, and as much for a weight
    that is brought to the same form, where the mean is a quarter of the largest."""
    if dtype != torch.float32 or activation_bits is None:
        return ROUNDING[dtype]
    return max(ROUNDING[dtype], 2.0 ** (3 - activation_bits))


def rounding_of_activations(scheme: QuantScheme, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """How far outputs may be off because the scheme lets a kernel round ``x: [num_tokens, in]``; float64.

    ``weight: [out, in]`` float64. Returns ``[num_tokens, out]``, or a scalar 0.
    """
    if scheme.activation is Activation.NONE:
        return torch.zeros((), dtype=torch.float64)
    wide, weight = x.double().abs(), weight.abs()
    if (
        scheme.activation_number is Number.FP8_E4M3
    ):  # three bits behind the leading one, and a step for what is tiny
        return (wide / 16 + wide.amax() / 448 / 512) @ weight.T
    assert scheme.activation_number is Number.INT, scheme
    return wide.amax(1, keepdim=True) / 254 * weight.sum(1)


def static_scale(scheme: QuantScheme, x: torch.Tensor) -> torch.Tensor | None:
    """Of activations that are rounded by a scale in the checkpoint: the least that cuts nothing off."""
    if scheme.activation is not Activation.STATIC_TENSOR:
        return None
    return x.float().abs().amax() / 448
