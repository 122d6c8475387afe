"""Products with a matrix that stays quantized: whole numbers of 4 or 8 bits, and a scale for each group of columns.

Activations are float32 or bfloat16, and products are of whole numbers: activations in 16-bit fixed point. Of few rows
each 32 neighbours have a scale, and every code is read once and multiplied as it is; so it is of many with VNNI. With
AMX, strips of the matrix become 16-bit numbers with a scale for each row, in cache; and without either, floats.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native import float32, int32, int64, pointer
from inferplane_kernels_cpu.native_ops import native_ops
from inferplane_kernels_cpu.pages import weight_pages

DTYPES = (torch.float32, torch.bfloat16)

_STRIP = 16


class _Matrix(ctypes.Structure):
    """``QuantizedMatrix`` of csrc/quantized_matrix.h."""

    _fields_: ClassVar = [
        ("strips", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("strip_bytes", ctypes.c_int64),
        ("scale_offset", ctypes.c_int64),
        ("minimum_offset", ctypes.c_int64),
        ("bits", ctypes.c_int32),
        ("zero", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("unit", ctypes.c_int32),
        ("num_units", ctypes.c_int32),
        ("scale_bytes", ctypes.c_int32),
        ("has_minimum", ctypes.c_int32),
        ("spare_bits", ctypes.c_int32),
    ]


class QuantizedProduct:
    """By ``[out_features, in_features]`` of ``(code - zero) * scale + minimum``, packed once.

    ``codes``: uint8 ``[out_features, in_features]`` or, of 4 bits, ``[out_features, ceil(in_features / 2)]`` with the
    even column in the low half of a byte. ``scale`` and ``minimum``: ``[out_features, ceil(in_features / group)]`` of a
    float type; both are kept as float16 where that changes no number. ``group`` is a multiple of 16. ``bias``:
    ``[out_features]``. ``at`` is a level of `native.LEVELS` other than the one in use.
    """

    def __init__(
        self,
        codes: torch.Tensor,
        scale: torch.Tensor,
        minimum: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        in_features: int,
        bits: int,
        zero: int,
        group: int,
        at: str | None = None,
    ) -> None:
        if bits not in (4, 8) or group % _STRIP:
            raise ValueError(
                f"packs 4 and 8 bits in groups of a multiple of 16, not {bits} in groups of {group}"
            )
        out_features, num_groups = scale.shape
        unit = 32 if group % 32 == 0 else 16
        num_units = -(-in_features // unit)
        scale = scale.float().contiguous()
        minimum = None if minimum is None else minimum.float().contiguous()
        is_narrow = _fits_half(scale) and (minimum is None or _fits_half(minimum))
        scale_bytes = 2 if is_narrow else 4
        code_bytes, part_bytes = num_units * unit * _STRIP * bits // 8, num_groups * _STRIP * scale_bytes
        strip_bytes = -(-(code_bytes + part_bytes * (1 if minimum is None else 2)) // 64) * 64
        self._strips = weight_pages.take(-(-out_features // _STRIP) * strip_bytes)
        self._bias = None if bias is None else bias.float().contiguous()
        self._matrix = _Matrix(
            self._strips.data_ptr(),
            _address(self._bias),
            out_features,
            in_features,
            strip_bytes,
            code_bytes,
            code_bytes + part_bytes,
            bits,
            zero,
            group,
            unit,
            num_units,
            scale_bytes,
            minimum is not None,
            _spare_bits(codes) if bits == 8 else 0,
        )
        self._address = ctypes.addressof(self._matrix)
        self._can_gate = out_features % (2 * _STRIP) == 0
        self._multiply = native.kernel(
            "quantized_multiply", pointer, int32, pointer, pointer, int64, int32, at=at
        )
        self._multiply_after_norm = native.kernel(
            "quantized_multiply_after_norm",
            *(pointer, int32, pointer, pointer, pointer, float32, pointer, int64, int32),
            at=at,
        )
        self._rows = native.kernel("quantized_rows", pointer, pointer, int64, pointer, pointer, at=at)
        pack = native.kernel("quantized_pack", pointer, pointer, int64, pointer, pointer, pointer, at=at)
        codes = codes.contiguous()
        pack(
            self._address,
            codes.data_ptr(),
            codes.shape[1],
            scale.data_ptr(),
            _address(minimum),
            self._matrix.strips,
        )

    @property
    def num_bytes(self) -> int:
        return self._strips.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_rows, in_features] -> [num_rows, out_features]``, both of one dtype of `DTYPES`."""
        return self._product(x, is_gated=False)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * value`` of the product, whose first half is the gate: ``[num_rows, out_features / 2]``."""
        if not self._can_gate:
            return native_ops().silu_and_mul(self(x))
        return self._product(x, is_gated=True)

    def after_add_rms_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        *,
        is_gated: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of ``rms_norm(x + residual) * weight``, gated or not; and the sum, in residual's memory."""
        gates = is_gated and self._can_gate
        x = x.contiguous()
        out = self._empty(x, is_gated=gates)
        total = x if residual is None else residual.contiguous()
        self._multiply_after_norm(
            self._address,
            DTYPES.index(x.dtype),
            x.data_ptr(),
            None if residual is None else total.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.shape[0],
            gates,
        )
        return (native_ops().silu_and_mul(out) if is_gated and not gates else out), total

    def _product(self, x: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
        x = x.contiguous()
        out = self._empty(x, is_gated=is_gated)
        self._multiply(
            self._address, DTYPES.index(x.dtype), x.data_ptr(), out.data_ptr(), x.shape[0], is_gated
        )
        return out

    def _empty(self, x: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
        width = self._matrix.out_features
        return x.new_empty(x.shape[0], width // 2 if is_gated else width)

    def rows(self, index: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Rows of the matrix, ``index: [n]`` int64 to ``[n, in_features]`` in bfloat16 or float32."""
        index = index.contiguous()
        out = torch.empty(len(index), self._matrix.in_features, dtype=dtype)
        wide, narrow = (out.data_ptr(), None) if dtype == torch.float32 else (None, out.data_ptr())
        self._rows(self._address, index.data_ptr(), len(index), wide, narrow)
        return out


def _spare_bits(codes: torch.Tensor) -> int:
    """Of signed numbers that hold how far the codes are from 128. Never fewer than 4 are left to them: with a minimum,
    factors of still fewer would not fit in 16 bits."""
    lowest, highest = (int(code) - 128 for code in codes.aminmax())
    return min(4, 7 - max(-lowest - 1, highest, 0).bit_length())


def _fits_half(values: torch.Tensor) -> bool:
    return bool(torch.equal(values.half().float(), values))


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
