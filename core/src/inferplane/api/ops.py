"""Ops: one signature, one reference body, many providers.

A layer calls ``ops.rms_norm(...)`` on the `OpTable` that was resolved for the model; it never knows whose it is.
The functions below, in `inferplane.api.state_ops`, `inferplane.api.encoder_ops` and `inferplane.api.causal_op` are the
references: plain torch, right before fast, and what runs when nobody provides better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.api.causal_op import causal_attention
from inferplane.api.device import DeviceDescriptor
from inferplane.api.draw_op import draw_token
from inferplane.api.encoder_ops import encoder_attention
from inferplane.api.op import DEFAULT_TOLERANCES, OPS, Op, Tolerance, declare_op, random_tensor
from inferplane.api.state_ops import causal_conv1d, gated_delta_rule, selective_scan, ssm_scan

__all__ = [
    "DEFAULT_TOLERANCES",
    "EXPERT_ACTIVATIONS",
    "OPS",
    "Op",
    "OpImpl",
    "OpQuery",
    "OpTable",
    "Tolerance",
    "add_rms_norm",
    "best_token",
    "causal_attention",
    "causal_conv1d",
    "draw_token",
    "encoder_attention",
    "fused_experts",
    "gated_delta_rule",
    "gelu_tanh_and_mul",
    "rms_norm",
    "rotary",
    "selective_scan",
    "silu_and_mul",
    "ssm_scan",
    "topk_softmax",
]


@dataclass(frozen=True)
class OpQuery:
    """What a provider is told when it is asked whether it supports an op."""

    device: DeviceDescriptor
    dtype: torch.dtype


def _always(query: OpQuery) -> str | None:
    return None


@dataclass(frozen=True)
class OpImpl:
    """A plugin's implementation of a declared op. Same signature and aliasing rules as the reference."""

    op: str
    fn: Callable[..., Any]
    provider: str
    unsupported_reason: Callable[[OpQuery], str | None] = _always
    """None when it can serve the query, else why not, for ``plugins explain``."""
    priority: int = 0


class OpTable:
    """The resolved ops as attributes; frozen once made, so that hot code may keep the functions."""

    rms_norm: Callable[..., torch.Tensor]
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotary: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    silu_and_mul: Callable[..., torch.Tensor]
    gelu_tanh_and_mul: Callable[..., torch.Tensor]
    topk_softmax: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    fused_experts: Callable[..., torch.Tensor]
    causal_conv1d: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    ssm_scan: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    selective_scan: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_delta_rule: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    best_token: Callable[..., torch.Tensor]
    draw_token: Callable[..., torch.Tensor]
    encoder_attention: Callable[..., torch.Tensor]
    causal_attention: Callable[..., torch.Tensor]

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        if missing := OPS.keys() - functions.keys():
            raise ValueError(f"op table lacks {sorted(missing)}")
        for name, fn in functions.items():
            object.__setattr__(self, name, fn)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the op table is frozen; provide {name!r} through the op_implementations hook")


@declare_op(lambda g, dtype: (random_tensor(g, dtype, 7, 96), random_tensor(g, dtype, 96), 1e-6))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), computed in float32.

    ``x: [..., dim]``, ``weight: [dim]``. Returns a new tensor like x.
    """
    wide = x.float() if x.dtype != torch.float64 else x
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@declare_op(
    lambda g, dtype: (
        random_tensor(g, dtype, 7, 96),
        random_tensor(g, dtype, 7, 96),
        random_tensor(g, dtype, 96),
        1e-6,
    ),
    overwrites=(0, 1),
)
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``s = x + residual``; returns ``(rms_norm(s), s)``. May reuse the memory of x and residual for the results."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def _rotary_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    positions = torch.randint(0, 32, (7,), generator=g)
    angles = torch.randn(32, 8, generator=g)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    return random_tensor(g, dtype, 7, 4, 24), random_tensor(g, dtype, 7, 2, 24), positions, table


@declare_op(_rotary_inputs, overwrites=(0, 1))
def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding (arXiv:2104.09864), half-split pairing, over the first ``rotary_dim`` of each head.

    ``q: [num_tokens, num_heads, head_dim]``, ``k: [num_tokens, num_kv_heads, head_dim]``, ``positions: [num_tokens]``
    int64, ``cos_sin: [max_positions, rotary_dim]`` float32 with cosines in the first half. Computed in the inputs'
    dtype after the table is cast to it. May work in place; the result is what counts.
    """
    half = cos_sin.shape[-1] // 2
    cos, sin = cos_sin[positions].to(q.dtype).unsqueeze(1).split(half, dim=-1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@declare_op(lambda g, dtype: (random_tensor(g, dtype, 7, 2 * 48),))
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up: [..., 2 * dim]`` with the gate in the first half. Returns ``[..., dim]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@declare_op(lambda g, dtype: (random_tensor(g, dtype, 7, 2 * 48),))
def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh form of GELU (arXiv:1606.08415); shapes as in `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def _topk_softmax_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    # no two logits of a row are equal in any dtype, or the choice would be open
    logits = torch.stack([torch.randperm(16, generator=g) for _ in range(7)]) / 4 - 2
    return logits.to(dtype), 4, True


@declare_op(_topk_softmax_inputs)
def topk_softmax(logits: torch.Tensor, top_k: int, renormalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``top_k`` experts of each token and their softmax probabilities, largest first, equal ones in any order.

    ``logits: [num_tokens, num_experts]``, softmax in float32. With ``renormalize`` each row's probabilities are
    divided by their sum. Returns ``(weights [num_tokens, top_k] float32, ids [num_tokens, top_k] int32)``.
    """
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    weights, ids = logits.softmax(-1, dtype=wide).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids.int()


def _fused_experts_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    num_tokens, num_experts, hidden, inner = 9, 5, 32, 24
    ids = torch.stack([torch.randperm(num_experts, generator=g)[:2] for _ in range(num_tokens)]).int()
    weights = torch.rand(num_tokens, 2, generator=g).softmax(-1)
    w13 = random_tensor(g, dtype, num_experts, 2 * inner, hidden) * hidden**-0.5
    w2 = random_tensor(g, dtype, num_experts, hidden, inner) * inner**-0.5
    return random_tensor(g, dtype, num_tokens, hidden), weights, ids, w13, w2


@declare_op(_fused_experts_inputs)
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
) -> torch.Tensor:
    """Each token through its experts, gated feed-forward networks, summed by its weights.

    ``x: [num_tokens, hidden]``, ``topk_weights: [num_tokens, top_k]`` float32, ``topk_ids: [num_tokens, top_k]`` int32
    (no id twice in a row), ``w13: [num_experts, 2 * inner, hidden]`` with the gate's rows first, ``w2: [num_experts,
    hidden, inner]``, ``w13_bias: [num_experts, 2 * inner]``, ``w2_bias: [num_experts, hidden]``. The tensors hold the
    experts from ``first_expert`` on; an id of any other expert adds nothing, because another rank has it.
    ``activation`` is one of `EXPERT_ACTIVATIONS`; ``swiglu_alpha`` and ``swiglu_limit`` belong to ``clamped_swiglu``.
    Returns ``[num_tokens, hidden]`` in x's dtype, summed over experts in float32.

    This reference asks the host which experts were chosen, and so cannot be captured in a graph.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    out = torch.zeros(x.shape, dtype=wide, device=x.device)
    local_ids = topk_ids - first_expert
    for expert in local_ids.unique().tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        rows, columns = (local_ids == expert).nonzero(as_tuple=True)
        gate_up = torch.nn.functional.linear(
            x[rows], w13[expert], None if w13_bias is None else w13_bias[expert]
        )
        inner = _gate(gate_up, activation, swiglu_alpha, swiglu_limit)
        y = torch.nn.functional.linear(inner, w2[expert], None if w2_bias is None else w2_bias[expert])
        out.index_add_(0, rows, y.to(wide) * topk_weights[rows, columns].to(wide).unsqueeze(-1))
    return out.to(x.dtype)


EXPERT_ACTIVATIONS = ("silu", "gelu_tanh", "clamped_swiglu")
"""``act(gate) * up``; clamped_swiglu is ``g * sigmoid(alpha * g) * (u + 1)`` with g the gate clamped from above and u
the up clamped from both sides at the limit."""


def _gate(gate_up: torch.Tensor, activation: str, alpha: float, limit: float) -> torch.Tensor:
    if activation == "silu":
        return silu_and_mul(gate_up)
    if activation == "gelu_tanh":
        return gelu_tanh_and_mul(gate_up)
    if activation == "clamped_swiglu":
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + 1)
    raise ValueError(f"activation {activation!r} should be one of {', '.join(EXPERT_ACTIVATIONS)}")


def _best_token_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    logits = random_tensor(g, dtype, 6, 1000)
    logits[1] = float("-inf")
    logits[2, 700] = float("nan")
    logits[3, [40, 900]] = 9.0
    return (logits,)


@declare_op(_best_token_inputs)
def best_token(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, of equal ones the first, and which rows have none.

    ``logits: [num_rows, vocab_size]``. Returns ``[2, num_rows]`` int64: the tokens, and below each 0; or 0 and below it
    1 for a row that has something that is not a number, or whose largest logit is infinite.
    """
    best, token_ids = logits.max(dim=-1)
    is_wrong = best.isfinite().logical_not()
    return torch.stack((token_ids.masked_fill(is_wrong, 0), is_wrong.long()))
