"""`QuantizedWeight`: the numbers of a quantized matrix in the one layout that kernels and formats agree on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch


class Number(Enum):
    """What a code stands for, before its scale."""

    INT = "int"
    """A whole number from ``-2 ** (bits - 1)`` up."""
    FP8_E4M3 = "fp8_e4m3"
    FP8_E5M2 = "fp8_e5m2"
    FP4 = "fp4"
    """E2M1 (OCP MX 1.0): 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives."""
    NF4 = "nf4"
    """16 quantiles of a normal distribution (arXiv:2305.14314)."""
    TABLE4 = "table4"
    """Any 16 numbers, which the weight brings along."""


FLOAT8 = {Number.FP8_E4M3: torch.float8_e4m3fn, Number.FP8_E5M2: torch.float8_e5m2}

_HALF_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
TABLES = {
    Number.FP4: (*_HALF_FP4, *(-value for value in _HALF_FP4)),
    Number.NF4: (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
}  # fmt: skip
"""The number of each code of four bits."""


@dataclass(frozen=True)
class Granularity:
    """One scale is for a block of ``rows`` times ``columns`` of the matrix; None is all of them."""

    rows: int | None
    columns: int | None

    def __str__(self) -> str:
        if self.rows is None:
            return "tensor" if self.columns is None else f"columns of {self.columns}"
        if self.rows == 1:
            return "channel" if self.columns is None else f"group {self.columns}"
        return f"block {self.rows}×{self.columns or 'all'}"

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """Blocks at the ends may be cut short."""
        rows = 1 if self.rows is None else -(-out_features // self.rows)
        columns = 1 if self.columns is None else -(-in_features // self.columns)
        return rows, columns


TENSOR, CHANNEL = Granularity(None, None), Granularity(1, None)


class Activation(Enum):
    """How the other factor was meant to be quantized; a kernel may be more exact, and use it as it is."""

    NONE = "none"
    STATIC_TENSOR = "static, tensor"
    """By ``input_scale``."""
    DYNAMIC_TENSOR = "dynamic, tensor"
    DYNAMIC_TOKEN = "dynamic, token"
    DYNAMIC_GROUP = "dynamic, group"
    """By as many columns of a token as the weight's blocks have."""


@dataclass(frozen=True)
class QuantScheme:
    """What a weight is; two of equal schemes can be one matrix."""

    number: Number
    bits: int
    granularity: Granularity
    scale_dtype: torch.dtype
    is_symmetric: bool = True
    """False where codes have zero points."""
    has_offset: bool = False
    """Whether something is added behind the scale, as to formats that store a block's minimum."""
    has_column_order: bool = False
    """Whether columns belong to groups in any order (act-order)."""
    activation: Activation = Activation.NONE
    activation_number: Number | None = None

    def __str__(self) -> str:
        number = f"int{self.bits}" if self.number is Number.INT else self.number.value
        parts = [number, str(self.granularity)]
        parts += [] if self.is_symmetric else ["with zero points"]
        parts += ["with offsets"] if self.has_offset else []
        parts += ["act-order"] if self.has_column_order else []
        if self.activation is not Activation.NONE and self.activation_number is not None:
            parts.append(f"activations {self.activation_number.value} ({self.activation.value})")
        return ", ".join(parts)

    @property
    def is_packed(self) -> bool:
        """Whether a byte holds two codes."""
        return self.number not in FLOAT8 and self.bits <= 4


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A matrix ``[out_features, in_features]``: ``(code - zero) * scale + offset``, computed in float32.

    ``codes``: of fp8 the numbers themselves; of integers above four bits int8; else uint8 ``[out, ceil(in / 2)]``, two
    codes a byte, the even column's in its low half, integers with 8 added (so those of two and three bits, too).
    """

    scheme: QuantScheme
    out_features: int
    in_features: int
    codes: torch.Tensor
    scale: torch.Tensor
    """``scheme.granularity.scale_shape(...)``; never of a narrower type than its checkpoint's."""
    zero: torch.Tensor | None = None
    """Of the scale's shape, int8 or a float type, in the codes' own terms; None where all are 0."""
    column_group: torch.Tensor | None = None
    """int32 ``[in_features]``: the column of ``scale`` that each column of the matrix takes; None: by position."""
    input_scale: torch.Tensor | None = None
    """float32 scalar: what one step of the quantized activations stands for."""
    table: torch.Tensor | None = None
    """float32 [16], of `Number.TABLE4`."""
    offset: torch.Tensor | None = None
    """Of the scale's shape and type; None where nothing is added."""

    def __post_init__(self) -> None:
        want = self.scheme.granularity.scale_shape(self.out_features, self.in_features)
        groups_are_free = self.column_group is not None
        if self.scale.shape[0] != want[0] or not (groups_are_free or self.scale.shape[1] == want[1]):
            raise ValueError(f"scale should be {list(want)}, is {list(self.scale.shape)}")

    @property
    def num_bytes(self) -> int:
        parts = (self.codes, self.scale, self.zero, self.offset, self.column_group)
        return sum(part.nbytes for part in parts if part is not None)

    def unpacked(self) -> torch.Tensor:
        """``[out_features, in_features]`` codes: int8, or the float8 numbers."""
        if not self.scheme.is_packed:
            return self.codes
        codes = torch.stack([self.codes & 15, self.codes >> 4], -1).flatten(1)[:, : self.in_features]
        return codes.to(torch.int8) - (8 if self.scheme.number is Number.INT else 0)

    def values(self) -> torch.Tensor:
        """float32 ``[out_features, in_features]``, before zero points and scales."""
        codes = self.unpacked()
        if self.scheme.number is Number.INT or self.scheme.number in FLOAT8:
            return codes.float()
        table = self.table
        if table is None:
            table = torch.tensor(TABLES[self.scheme.number], device=codes.device)
        return table[codes.int()]

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """``[out_features, in_features]``, rounded to ``dtype`` once, from float32."""
        values = self.values()
        if self.zero is not None:
            values -= self._spread(self.zero)
        values *= self._spread(self.scale)
        if self.offset is not None:
            values += self._spread(self.offset)
        return values.to(dtype)

    def rows(self, index: slice | torch.Tensor) -> QuantizedWeight:
        """Some rows, in any order."""
        granularity = self.scheme.granularity
        if granularity.rows is None:
            size = len(range(self.out_features)[index]) if isinstance(index, slice) else len(index)
            return replace(self, out_features=size, codes=_take(self.codes, index))
        if granularity.rows == 1:
            codes = _take(self.codes, index)
            return replace(self, out_features=len(codes), codes=codes, **self._blocks(_take, index))
        if isinstance(index, slice):
            start, stop, step = index.indices(self.out_features)
            block = granularity.rows
            if step == 1 and start % block == 0 and (stop % block == 0 or stop == self.out_features):
                blocks = slice(start // block, -(-stop // block))
                return replace(
                    self,
                    out_features=stop - start,
                    codes=self.codes[index],
                    **self._blocks(_take, blocks),
                )
        return self.by_row().rows(index)

    def columns(self, start: int, stop: int) -> QuantizedWeight:
        """Raises ValueError where that would cut a group in two."""
        if (start, stop) == (0, self.in_features):
            return self
        codes, size = _columns(self, start, stop), self.scheme.granularity.columns
        if self.column_group is not None:
            group = self.column_group[start:stop]
            return replace(self, in_features=stop - start, codes=codes, column_group=group)
        if size is None:
            return replace(self, in_features=stop - start, codes=codes)
        if start % size or (stop % size and stop != self.in_features):
            raise ValueError(
                f"columns {start} to {stop} of {self.in_features} cut a group of {size} that has one scale"
            )
        groups = slice(start // size, -(-stop // size))
        return replace(
            self, in_features=stop - start, codes=codes, **self._blocks(lambda each: each[:, groups])
        )

    def by_row(self) -> QuantizedWeight:
        """The same numbers with scales of each row's own."""
        granularity = self.scheme.granularity
        if granularity.rows == 1:
            return self
        scheme = replace(self.scheme, granularity=Granularity(1, granularity.columns))

        def by_row(tensor: torch.Tensor) -> torch.Tensor:
            spread = _bytes(tensor).repeat_interleave(granularity.rows or self.out_features, 0)
            return spread[: self.out_features].view(tensor.dtype)

        return replace(self, scheme=scheme, **self._blocks(by_row))

    def with_zero(self) -> QuantizedWeight:
        """The same numbers with zero points, if only of 0."""
        if self.zero is not None:
            return self
        zero = torch.zeros_like(self.scale, dtype=torch.int8)
        return replace(self, zero=zero, scheme=replace(self.scheme, is_symmetric=False))

    def _blocks(self, change: Callable[..., torch.Tensor], *arguments: Any) -> dict[str, Any]:
        """What there is one of for each block, changed alike."""
        names = ("scale", "zero", "offset")
        values = {name: getattr(self, name) for name in names}
        return {name: None if value is None else change(value, *arguments) for name, value in values.items()}

    def _spread(self, tensor: torch.Tensor) -> torch.Tensor:
        """A scale or zero for each element, or one that broadcasts over them, as float32."""
        granularity, tensor = self.scheme.granularity, tensor.float()
        if granularity.rows is not None and granularity.rows > 1:
            tensor = tensor.repeat_interleave(granularity.rows, 0)[: self.out_features]
        if self.column_group is not None:
            return tensor[:, self.column_group]
        if granularity.columns is not None:
            tensor = tensor.repeat_interleave(granularity.columns, 1)[:, : self.in_features]
        return tensor


def stack(parts: Sequence[QuantizedWeight], names: Sequence[str]) -> QuantizedWeight:
    """Matrices one below another as one. Raises ValueError naming two whose schemes differ."""
    if len(parts) == 1:
        return parts[0]
    block = parts[0].scheme.granularity.rows
    if block != 1 and (block is None or any(part.out_features % block for part in parts[:-1])):
        parts = [part.by_row() for part in parts]
    if any(part.zero is not None for part in parts):
        parts = [part.with_zero() for part in parts]
    first = parts[0]
    for name, part in zip(names, parts):
        if part.scheme != first.scheme:
            raise ValueError(
                f"{names[0]} and {name} are one product, but are quantized differently: {first.scheme}; {part.scheme}"
            )
        for what in ("column_group", "table"):
            mine, other = getattr(first, what), getattr(part, what)
            if (mine is None) != (other is None) or (mine is not None and not _same(mine, other)):
                raise ValueError(f"{names[0]} and {name} are one product, but differ in their {what}")
    input_scales = [part.input_scale for part in parts if part.input_scale is not None]
    return replace(
        first,
        out_features=sum(part.out_features for part in parts),
        codes=_cat([part.codes for part in parts]),
        scale=_cat([part.scale for part in parts]),
        zero=None if first.zero is None else _cat([part.zero for part in parts if part.zero is not None]),
        offset=None
        if first.offset is None
        else _cat([part.offset for part in parts if part.offset is not None]),
        input_scale=torch.stack(input_scales).amax(0) if input_scales else None,
    )


def _same(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return mine.is_meta or bool(torch.equal(mine, other))


def _take(tensor: torch.Tensor, index: slice | torch.Tensor) -> torch.Tensor:
    if isinstance(index, torch.Tensor):
        index = index.to(tensor.device)
    return _bytes(tensor)[index].view(tensor.dtype)


def _cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([_bytes(each) for each in tensors]).view(tensors[0].dtype)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not every operation knows every 8-bit type."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """``[rows, columns]`` of 0 to 15 as uint8 ``[rows, ceil(columns / 2)]``, the even column in the low half."""
    codes = codes.to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def _columns(weight: QuantizedWeight, start: int, stop: int) -> torch.Tensor:
    if not weight.scheme.is_packed:
        return weight.codes[:, start:stop].contiguous()
    if start % 2 == 0:
        return weight.codes[:, start // 2 : -(-stop // 2)].contiguous()
    offset = 8 if weight.scheme.number is Number.INT else 0
    return pack_nibbles(weight.unpacked()[:, start:stop] + offset)
