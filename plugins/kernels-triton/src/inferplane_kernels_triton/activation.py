"""Gated activations."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from inferplane_kernels_triton.launch import begin, options, require_unit_stride


@triton.jit
def silu(x):
    """``x * sigmoid(x)`` in float32."""
    x = x.to(tl.float32)
    return x / (1.0 + tl.exp(-x))


@triton.jit
def gated_activation(gate, up, alpha, limit, ACTIVATION: tl.constexpr):
    """``silu``, ``gelu_tanh`` or ``clamped_swiglu`` of gate and up in float32, as the op ``fused_experts`` has them."""
    if ACTIVATION == "silu":
        return silu(gate) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0)) * up
    else:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def _silu_and_mul(x_ptr, out_ptr, x_row, dim, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One program makes BLOCK columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < dim
    begin(PDL)
    gate = tl.load(x_ptr + row * x_row + columns, mask=mask, other=0.0)
    up = tl.load(x_ptr + row * x_row + dim + columns, mask=mask, other=0.0)
    product = silu(gate).to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * dim + columns, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up: [..., 2 * dim]`` with the gate in the first half. Returns ``[..., dim]``."""
    require_unit_stride(gate_up=gate_up)
    dim = gate_up.shape[-1] // 2
    rows = gate_up if gate_up.dim() == 2 else gate_up.reshape(-1, 2 * dim)
    if out is None:
        out = torch.empty((*gate_up.shape[:-1], dim), dtype=gate_up.dtype, device=gate_up.device)
    if len(rows):
        block = min(1024, triton.next_power_of_2(dim))
        grid = (len(rows), triton.cdiv(dim, block))
        _silu_and_mul[grid](rows, out, rows.stride(0), dim, BLOCK=block, PDL=pdl, **options(pdl, num_warps=4))
    return out
