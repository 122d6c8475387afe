"""Mixtures of experts by the native library: routes sorted by expert, and each expert's matrices read once."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.native import int64, pointer
from inferplane_kernels_cpu.native_linear import DTYPES

ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")


class _Experts(ctypes.Structure):
    """`Experts` of csrc/kernels/experts.cpp."""

    _fields_ = [
        *((name, pointer) for name in ("w13", "w2", "w13_bias", "w2_bias")),
        *((name, int64) for name in ("num_experts", "first_expert", "hidden", "inner", "dtype")),
        ("activation", ctypes.c_int32),
        ("swiglu_alpha", ctypes.c_float),
        ("swiglu_limit", ctypes.c_float),
    ]


class _Memory(ctypes.Structure):
    """`ExpertsMemory` there."""

    _fields_ = [(name, pointer) for name in ("rows", "gate_up", "inner", "results", "starts", "places")]


def fused_experts(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    activation: str = "silu",
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    first_expert: int = 0,
    swiglu_alpha: float = 1.702,
    swiglu_limit: float = 7.0,
    at: str | None = None,
) -> torch.Tensor:
    """Each token through its experts, gated feed-forward networks, summed by its weights in float32.

    ``x: [num_tokens, hidden]`` of one of `DTYPES`, which weights and biases share; ``topk_weights, topk_ids:
    [num_tokens, top_k]``; ``w13: [num_experts, 2 * inner, hidden]`` with the gate's rows first, ``w2: [num_experts,
    hidden, inner]``, ``w13_bias: [num_experts, 2 * inner]``, ``w2_bias: [num_experts, hidden]``. An id outside of
    ``first_expert`` to ``first_expert + num_experts`` adds nothing. ``at`` is a level of instructions. Raises
    `ValueError` for an activation that is none of `ACTIVATIONS`.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} should be one of {', '.join(ACTIVATIONS)}")
    # by names: a copy without one would be freed before it is read
    x, weights, ids = x.contiguous(), topk_weights.float().contiguous(), topk_ids.int().contiguous()
    tensors = [None if each is None else each.contiguous() for each in (w13, w2, w13_bias, w2_bias)]
    num_tokens, top_k = ids.shape
    num_experts, hidden, inner = w2.shape
    num_routes = num_tokens * top_k
    experts = _Experts(
        *map(_address, tensors),
        num_experts,
        first_expert,
        hidden,
        inner,
        DTYPES[x.dtype],
        ACTIVATIONS.index(activation),
        swiglu_alpha,
        swiglu_limit,
    )
    out = x.new_empty(num_tokens, hidden)
    room = [
        x.new_empty(num_routes, hidden),
        x.new_empty(0 if activation == "silu" else num_routes, 2 * inner),
        x.new_empty(num_routes, inner),
        x.new_empty(num_routes, hidden),
        ids.new_empty(num_experts + 1),
        ids.new_empty(num_routes),
    ]
    _function(at or native.level())(
        experts,
        _Memory(*map(_address, room)),
        x.data_ptr(),
        weights.data_ptr(),
        ids.data_ptr(),
        out.data_ptr(),
        num_tokens,
        top_k,
    )
    return out


def _address(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


@cache
def _function(level: str) -> native.Kernel:
    return native.kernel("fused_experts", _Experts, _Memory, *[pointer] * 4, int64, int64, at=level)
