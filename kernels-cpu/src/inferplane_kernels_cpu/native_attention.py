"""Attention over a paged KV cache by the native library: one call a layer stores a step's keys and values and attends.

The KV tensor of a layer is ``[num_blocks, num_kv_heads, 2 * block_size * head_dim]``, of one that keeps latents half as
large, and of int8 with 4 bytes more for each row; how a block of one head lies within is the library's affair
(``csrc/kv_tiles.h``).
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from inferplane_kernels_cpu import native

DTYPES = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float16),
)
"""Of queries, new keys and values and results; and of keys and values as they are stored."""
CODES = {torch.int8: 1, torch.float8_e4m3fn: 2, torch.float8_e5m2: 3}
"""Of one byte, as keys and values that come in any of these may be stored, too: int8 over a scale for each row, floats
of 8 bits over one for each KV head. They are read as what queries are."""
MAX_HEAD_DIM = 1024
TILE = 32
"""Tokens that are read at a time. Blocks of a multiple of them, and heads of a multiple of 16, are read where they lie;
others are copied first."""

Address = int
QKNorm = tuple[torch.Tensor, torch.Tensor, float]


class LayerShape(ctypes.Structure):
    """What the kernel knows of a layer. ``window``, ``chunk`` and ``soft_cap`` are 0 where there is none;
    ``is_latent`` is 1 where keys are values, too, and kept once. ``code`` is one of `CODES`, and ``k_scales`` and
    ``v_scales`` are addresses of ``[num_kv_heads]`` float32, or None where they are all 1."""

    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("chunk", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("is_latent", ctypes.c_int32),
        ("code", ctypes.c_int32),
        ("k_scales", ctypes.c_void_p),
        ("v_scales", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        ("block_table", ctypes.c_void_p),
        ("seq_lens", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_reqs", ctypes.c_int32),
        ("num_tokens", ctypes.c_int32),
    )


class Step:
    """Where the requests of a step lie. The tensors are kept and read at every call, so that their contents may change.

    ``block_table: [num_reqs, blocks]`` and ``seq_lens: [num_reqs]`` int32, ``query_start: [num_reqs + 1]`` int32,
    ``slots: [num_tokens]`` int64. Request i has the tokens ``query_start[i]`` to ``query_start[i + 1]`` of the step,
    the last of its ``seq_lens[i]``.
    """

    def __init__(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        for name, tensor, dtype in (
            ("block_table", block_table, torch.int32),
            ("seq_lens", seq_lens, torch.int32),
            ("query_start", query_start, torch.int32),
            ("slots", slots, torch.int64),
        ):
            if tensor.dtype != dtype or (tensor.numel() > 1 and tensor.stride(-1) != 1):
                raise ValueError(
                    f"{name} should be {dtype} with neighbouring elements in its last dimension, not {tensor.dtype} "
                    f"with strides {tensor.stride()}"
                )
        self._kept = (block_table, seq_lens, query_start, slots)
        self._fields = _Step(
            block_table.data_ptr(),
            seq_lens.data_ptr(),
            query_start.data_ptr(),
            slots.data_ptr(),
            block_table.stride(0),
            len(seq_lens),
            len(slots),
        )
        self.address: Address = ctypes.addressof(self._fields)


class PagedAttention:
    """The kernel for layers of one shape and pair of `DTYPES`, at one level of instructions."""

    def __init__(
        self,
        shape: LayerShape,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
        *,
        kv_scales: tuple[torch.Tensor, torch.Tensor] | None = None,
        at: str | None = None,
    ) -> None:
        """``kv_dtype``: by default as ``dtype``. ``kv_scales``: of keys and of values, ``[num_kv_heads]`` float32, by
        which 8-bit floats are multiplied. ``at``: one of `native.levels`, by default the one in use."""
        self._shape = shape
        self._kept = kv_scales
        shape.code = CODES.get(kv_dtype or dtype, 0)
        if kv_scales is not None:
            shape.k_scales, shape.v_scales = (scales.data_ptr() for scales in kv_scales)
        self._dtype = DTYPES.index((dtype, dtype if shape.code else kv_dtype or dtype))
        self._attend, self._rotate_and_attend = _kernels(at)
        self._address: Address = ctypes.addressof(shape)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv: torch.Tensor,
        step: Step,
        *,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Stores k and v, then attends: ``q: [num_tokens, num_heads, head_dim]``, ``k, v: [num_tokens, num_kv_heads,
        head_dim]``, ``sinks: [num_heads]`` float32. Of latents v is not looked at. Returns ``out``, like q, by default
        a new tensor."""
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype)
        q, k = (_with_packed_heads(x) for x in (q, k))
        v = k if self._shape.is_latent else _with_packed_heads(v)
        if k.stride(0) != v.stride(0):
            k, v = k.contiguous(), v.contiguous()
        self._attend(
            self._address,
            step.address,
            self._dtype,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0),
            kv.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out

    def rotate_and_attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        kv: torch.Tensor,
        step: Step,
        *,
        qk_norm: QKNorm | None = None,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`attend` after the norm of each head's q and k, if there is one, and the rotation of both (half-split pairs).

        ``qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, q before k before v.
        ``positions: [num_tokens]`` int64, ``cos_sin: [max_positions, rotary_dim]`` float32, cosines first;
        ``qk_norm`` is (weight of q, weight of k, eps), each weight ``[head_dim]``.
        """
        shape = self._shape
        if out is None:
            out = torch.empty((len(qkv), shape.num_heads, shape.head_dim), dtype=qkv.dtype)
        q_norm, k_norm, eps = qk_norm or (None, None, 0.0)
        self._rotate_and_attend(
            self._address,
            step.address,
            self._dtype,
            qkv.data_ptr(),
            qkv.stride(0),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            cos_sin.shape[1],
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            eps,
            kv.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            out.data_ptr(),
        )
        return out


def allocate_kv(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    is_latent: bool = False,
) -> torch.Tensor:
    """Uninitialised KV of one layer."""
    rows = block_size if is_latent else 2 * block_size
    row_size = head_dim + (4 if dtype == torch.int8 else 0)
    return torch.empty(num_blocks, num_kv_heads, rows * row_size, dtype=dtype)


def _with_packed_heads(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@cache
def _kernels(at: str | None) -> tuple[Any, Any]:
    address, number, size = native.pointer, native.int32, native.int64
    common = (address, address, number, address, size)
    attend = native.kernel(
        "paged_attention", *common, address, address, size, address, address, address, at=at
    )
    rotation = (address, address, number, address, address, native.float32)
    rotate_and_attend = native.kernel(
        "rotary_paged_attention", *common, *rotation, address, address, address, at=at
    )
    return attend, rotate_and_attend
