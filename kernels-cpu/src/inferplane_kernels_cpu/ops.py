"""Elementwise ops of a transformer layer, with as few passes over memory and as few calls as torch allows."""

from __future__ import annotations

import torch
from torch.nn import functional


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x: [..., dim]``, ``weight: [dim]``; a new tensor like x, the mean square taken in float32 at least."""
    if x.dtype != torch.float32:
        # torch's own keeps the half precisions in float32 between its steps, and is no slower for them
        return functional.rms_norm(x, weight.shape, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(rms_norm(x + residual), x + residual)``; the sum takes residual's memory."""
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half-split rotary embedding of ``q: [num_tokens, num_heads, head_dim]`` and ``k`` into new tensors.

    Where k lies right behind q, as in the product of a fused projection, both are rotated as one.
    """
    cos, sin = cos_sin[positions].to(q.dtype).unsqueeze(1).chunk(2, dim=-1)
    both = _as_one(q, k)
    if both is None:
        return _rotate(q, cos, sin), _rotate(k, cos, sin)
    rotated_q, rotated_k = _rotate(both, cos, sin).split([q.shape[1], k.shape[1]], dim=1)
    return rotated_q, rotated_k


def _as_one(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor | None:
    """``[num_tokens, num_heads + num_kv_heads, head_dim]`` over the memory of both, if it is in that order."""
    is_neighbour = (
        q.stride() == k.stride()
        and q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr()
        and k.storage_offset() == q.storage_offset() + q.shape[1] * q.stride(1)
    )
    if not is_neighbour:
        return None
    return q.as_strided((q.shape[0], q.shape[1] + k.shape[1], q.shape[2]), q.stride())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    out = x.new_empty(x.shape)
    first, second = x[..., :half], x[..., half : 2 * half]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out[..., half : 2 * half]).addcmul_(first, sin)
    if x.shape[-1] > 2 * half:
        out[..., 2 * half :] = x[..., 2 * half :]
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``[..., 2 * dim]``, the gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
