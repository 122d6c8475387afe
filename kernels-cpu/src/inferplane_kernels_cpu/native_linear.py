"""Products with a constant weight by the native library, norm and gate included."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native import float32, int32, int64, pointer

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Weight(ctypes.Structure):
    """`LinearWeight` of csrc/linear.h."""

    _fields_ = [
        ("weight", pointer),
        ("bias", pointer),
        ("in_features", int64),
        ("out_features", int64),
        ("dtype", int64),
    ]


class NativeLinear:
    """A weight as the checkpoint has it: read where it lies, neither packed nor copied. Sums are in float32.

    ``weight: [out_features, in_features]`` and ``bias: [out_features]`` of one dtype of `DTYPES`, which is x's too.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, level: str | None = None) -> None:
        self._weight = weight.detach().contiguous()
        self._bias = None if bias is None else bias.detach().to(weight.dtype).contiguous()
        self._out_features = weight.shape[0]
        self._half_of_out_features = weight.shape[0] // 2
        bias_pointer = None if self._bias is None else self._bias.data_ptr()
        self._native = _Weight(
            self._weight.data_ptr(), bias_pointer, *weight.shape[::-1], DTYPES[weight.dtype]
        )
        self._by_reference = ctypes.byref(self._native)
        self._multiply, self._multiply_after_norm = _functions(level or native.level())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features] -> [num_tokens, out_features]``"""
        out = x.new_empty(x.shape[0], self._out_features)
        self.into(out, x)
        return out

    def into(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """The product into contiguous memory that is there already."""
        x = x.contiguous()  # by name: a copy without one would be freed before it is read
        self._multiply(self._by_reference, x.data_ptr(), out.data_ptr(), x.shape[0], 0)

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * value`` of the product, whose first half is the gate: ``[num_tokens, out_features / 2]``."""
        x = x.contiguous()
        out = x.new_empty(x.shape[0], self._half_of_out_features)
        self._multiply(self._by_reference, x.data_ptr(), out.data_ptr(), x.shape[0], 1)
        return out

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
        x = x.contiguous()
        width = self._half_of_out_features if is_gated else self._out_features
        out = x.new_empty(x.shape[0], width)
        total = x if residual is None else residual.contiguous()
        self._multiply_after_norm(
            self._by_reference,
            x.data_ptr(),
            None if residual is None else total.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.shape[0],
            is_gated,
        )
        return out, total


@cache
def _functions(level: str) -> tuple[native.Kernel, native.Kernel]:
    multiply = native.kernel("linear", pointer, pointer, pointer, int64, int32, at=level)
    after_norm = native.kernel("linear_after_norm", *[pointer] * 4, float32, pointer, int64, int32, at=level)
    return multiply, after_norm
