"""Ops: one signature, one reference body, many providers.

A layer calls ``ops.rms_norm(...)`` on the `OpTable` that was resolved for the model; it never knows whose it is.
The functions below are the references: plain torch, right before fast, and what runs when nobody provides better.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import torch

from inferplane.api.device import DeviceDescriptor

Tolerance = tuple[float, float]
"""(relative, absolute) distance from the reference computed in float64."""

DEFAULT_TOLERANCES: Mapping[torch.dtype, Tolerance] = {
    torch.float32: (1e-5, 1e-5),
    torch.bfloat16: (2e-2, 2e-2),
    torch.float16: (3e-3, 3e-3),
}


@dataclass(frozen=True)
class Op:
    """A declared op. ``example_inputs(generator, dtype)`` makes the arguments of one test case."""

    name: str
    reference: Callable[..., Any]
    example_inputs: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]]
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=lambda: DEFAULT_TOLERANCES)
    overwrites: tuple[int, ...] = ()
    """Places of the arguments that an implementation may overwrite, because no caller looks at them again."""


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

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        if missing := OPS.keys() - functions.keys():
            raise ValueError(f"op table lacks {sorted(missing)}")
        for name, fn in functions.items():
            object.__setattr__(self, name, fn)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the op table is frozen; provide {name!r} through the op_implementations hook")


OPS: dict[str, Op] = {}
"""Every declared op by name."""


Reference = TypeVar("Reference", bound=Callable[..., Any])


def _op(
    example_inputs: Callable[[torch.Generator, torch.dtype], tuple[Any, ...]],
    overwrites: tuple[int, ...] = (),
) -> Callable[[Reference], Reference]:
    def declare(reference: Reference) -> Reference:
        name = reference.__name__
        OPS[name] = Op(name, reference, example_inputs, overwrites=overwrites)
        return reference

    return declare


def _randn(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


@_op(lambda g, dtype: (_randn(g, dtype, 7, 96), _randn(g, dtype, 96), 1e-6))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension (arXiv:1910.07467), computed in float32.

    ``x: [..., dim]``, ``weight: [dim]``. Returns a new tensor like x.
    """
    wide = x.float() if x.dtype != torch.float64 else x
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


@_op(
    lambda g, dtype: (_randn(g, dtype, 7, 96), _randn(g, dtype, 7, 96), _randn(g, dtype, 96), 1e-6),
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
    return _randn(g, dtype, 7, 4, 24), _randn(g, dtype, 7, 2, 24), positions, table


@_op(_rotary_inputs, overwrites=(0, 1))
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


@_op(lambda g, dtype: (_randn(g, dtype, 7, 2 * 48),))
def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up: [..., 2 * dim]`` with the gate in the first half. Returns ``[..., dim]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@_op(lambda g, dtype: (_randn(g, dtype, 7, 2 * 48),))
def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with the tanh form of GELU (arXiv:1606.08415); shapes as in `silu_and_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def _topk_softmax_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    # no two logits of a row are equal in any dtype, or the choice would be open
    logits = torch.stack([torch.randperm(16, generator=g) for _ in range(7)]) / 4 - 2
    return logits.to(dtype), 4, True


@_op(_topk_softmax_inputs)
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
    w13 = _randn(g, dtype, num_experts, 2 * inner, hidden) * hidden**-0.5
    w2 = _randn(g, dtype, num_experts, hidden, inner) * inner**-0.5
    return _randn(g, dtype, num_tokens, hidden), weights, ids, w13, w2


@_op(_fused_experts_inputs)
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


def _segments(g: torch.Generator) -> tuple[torch.Tensor, ...]:
    """A first segment, its continuation in another block, one token of an old request, and a new request."""
    starts, reads, writes = ([0, 70, 75, 76, 83], [0, 2, 3, 0], [2, 1, 3, 4])
    is_first = torch.tensor([True, False, False, True])
    return torch.tensor(starts, dtype=torch.int32), torch.tensor(reads), torch.tensor(writes), is_first


def _causal_conv1d_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    weight, bias, states = _randn(g, dtype, 24, 4), _randn(g, dtype, 24), _randn(g, dtype, 5, 24, 3)
    return _randn(g, dtype, 83, 24), weight, bias, states, *_segments(g)


@_op(_causal_conv1d_inputs, overwrites=(3,))
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    starts: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    is_first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel's weighted sum over a token and the ``width - 1`` before it in its request.

    ``x: [num_tokens, channels]``, ``weight: [channels, width]`` with the token's own factor last, ``bias: [channels]``,
    ``states: [num_blocks, channels, width - 1]`` the inputs before; the rest as in `StateSegments`
    (`inferplane.api.state`). Returns ``[num_tokens, channels]`` and states, which are changed in place.
    """
    out = torch.empty_like(x)
    width = weight.shape[1]
    bounds = starts.tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        before = states[reads[index]].to(x.dtype)
        if is_first[index]:
            before = torch.zeros_like(before)
        inputs = torch.cat([before, x[start:end].T], dim=1)
        out[start:end] = torch.einsum("cnw,cw->nc", inputs.unfold(1, width, 1), weight)
        states[writes[index]] = inputs[:, inputs.shape[1] - width + 1 :].to(states.dtype)
    return (out if bias is None else out + bias), states


def _ssm_scan_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    x, b, c = _randn(g, dtype, 83, 4, 8), _randn(g, dtype, 83, 2, 6), _randn(g, dtype, 83, 2, 6)
    steps = torch.rand(83, 4, generator=g) * 0.5
    return x, steps, -torch.rand(4, generator=g), b, c, torch.randn(5, 4, 8, 6, generator=g), *_segments(g)


SCAN_CHUNK = 64
"""Tokens whose influence on one another is computed as one matrix."""


@_op(_ssm_scan_inputs, overwrites=(5,))
def ssm_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    is_first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selective state space of Mamba 2 (arXiv:2405.21060), token after token in each head:
    ``state = exp(steps * decay) * state + steps * outer(x, b)`` and ``y = state @ c``.

    ``x: [num_tokens, num_heads, head_dim]``, ``steps: [num_tokens, num_heads]`` and ``decay: [num_heads]`` float32,
    ``b, c: [num_tokens, num_groups, state_size]`` each for ``num_heads / num_groups`` neighbouring heads,
    ``states: [num_blocks, num_heads, head_dim, state_size]`` float32; the rest as in `StateSegments`. Computed in
    float32 (float64 for float64). Returns y like x, and states, which are changed in place.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    per_group = x.shape[1] // b.shape[1]
    keys, queries = (each.to(wide).repeat_interleave(per_group, dim=1) for each in (b, c))
    values = x.to(wide) * steps.to(wide).unsqueeze(-1)
    rates = steps.to(wide) * decay.to(wide)
    out = torch.empty_like(x)
    bounds = starts.tolist()
    for index, (start, end) in enumerate(pairwise(bounds)):
        state = states[reads[index]].to(wide)
        if is_first[index]:
            state = torch.zeros_like(state)
        for first in range(start, end, SCAN_CHUNK):
            at = slice(first, min(first + SCAN_CHUNK, end))
            out[at], state = _scan_chunk(values[at], rates[at], keys[at], queries[at], state)
        states[writes[index]] = state.to(states.dtype)
    return out, states


def _scan_chunk(
    values: torch.Tensor, rates: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``values: [n, heads, head_dim]``, ``rates: [n, heads]``, ``keys, queries: [n, heads, state_size]``."""
    total = rates.cumsum(0)
    between = (total.unsqueeze(1) - total.unsqueeze(0)).permute(2, 0, 1)
    future = torch.ones(len(values), len(values), dtype=torch.bool, device=values.device).triu(1)
    influence = torch.einsum("ihs,jhs->hij", queries, keys) * between.masked_fill(future, float("-inf")).exp()
    own = torch.einsum("hij,jhd->ihd", influence, values)
    earlier = torch.einsum("ihs,hds,ih->ihd", queries, state, total.exp())
    left = (total[-1] - total).exp()
    added = torch.einsum("jhd,jhs,jh->hds", values, keys, left)
    return own + earlier, state * total[-1].exp().view(-1, 1, 1) + added
