"""Elementwise ops of a transformer layer by the native library: one pass over memory and one call each.

All take float32, bfloat16 and float16, compute in float32, and want weights in the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native import float32, int32, int64, pointer

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "rms_norm": (pointer, pointer, pointer, int64, int64, int64, float32, int32),
    "add_rms_norm": (pointer, pointer, pointer, pointer, int64, int64, int64, float32, int32),
    "rotary": (pointer, int64, int64, int64, int64, pointer, pointer, int64, int32),
    "silu_and_mul": (pointer, pointer, int64, int64, int64, int32),
    "gelu_tanh_and_mul": (pointer, pointer, int64, int64, int64, int32),
}


class NativeOps:
    """The ops at one level of instructions, by default the one in use."""

    def __init__(self, *, at: str | None = None) -> None:
        self._rms_norm, self._add_rms_norm, self._rotary, self._silu, self._gelu = (
            native.kernel(name, *parameters, at=at) for name, parameters in _PARAMETERS.items()
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """``x: [..., dim]``, ``weight: [dim]``; a new tensor like x."""
        out, rows = torch.empty(x.shape, dtype=x.dtype), _rows(x)
        num_rows, dim = rows.shape
        self._rms_norm(
            out.data_ptr(),
            rows.data_ptr(),
            weight.data_ptr(),
            num_rows,
            dim,
            rows.stride(0),
            eps,
            _NUMBERS[x.dtype],
        )
        return out

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(rms_norm(x + residual), x + residual)``; the sum takes residual's memory."""
        out, rows, total = torch.empty(x.shape, dtype=x.dtype), _rows(x), residual.contiguous()
        num_rows, dim = rows.shape
        self._add_rms_norm(
            out.data_ptr(),
            rows.data_ptr(),
            total.data_ptr(),
            weight.data_ptr(),
            num_rows,
            dim,
            rows.stride(0),
            eps,
            _NUMBERS[x.dtype],
        )
        return out, total

    def rotary(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Half-split rotary embedding of ``q: [num_tokens, num_heads, head_dim]`` and ``k``, where they lie.

        ``positions: [num_tokens]`` int64, ``cos_sin: [max_positions, rotary_dim]`` float32, cosines first. Where k lies
        right behind q, as in the product of a fused projection, both are turned as one.
        """
        q, k = _packed_heads(q), _packed_heads(k)
        num_heads, num_kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[2]
        behind = q.data_ptr() + num_heads * head_dim * q.element_size()
        parts = [(q, num_heads), (k, num_kv_heads)]
        if k.data_ptr() == behind and q.stride(0) == k.stride(0):
            parts = [(q, num_heads + num_kv_heads)]
        for heads, number in parts:
            self._rotary(
                heads.data_ptr(),
                len(heads),
                number,
                head_dim,
                heads.stride(0),
                positions.data_ptr(),
                cos_sin.data_ptr(),
                cos_sin.shape[1],
                _NUMBERS[q.dtype],
            )
        return q, k

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up`` of ``[..., 2 * dim]``, the gate first."""
        return _gate(self._silu, gate_up)

    def gelu_tanh_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``gelu(gate) * up`` with GELU's tanh form; shapes as in `silu_and_mul`."""
        return _gate(self._gelu, gate_up)


@cache
def native_ops() -> NativeOps:
    """At the level in use."""
    return NativeOps()


def _gate(kernel: Callable[..., None], gate_up: torch.Tensor) -> torch.Tensor:
    rows = _rows(gate_up)
    dim = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], dim), dtype=gate_up.dtype)
    kernel(out.data_ptr(), rows.data_ptr(), len(rows), dim, rows.stride(0), _NUMBERS[gate_up.dtype])
    return out


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``[rows, dim]`` with neighbouring elements in a row; a view where that is possible."""
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _packed_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
