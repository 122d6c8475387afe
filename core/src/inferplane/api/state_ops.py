"""Ops of layers that keep a state: each goes on from one state for each sequence, and leaves the state after it.

All take segments of one length, as a `StateRound` (`inferplane.api.state`) has them: ``states`` holds a state in each
of its blocks; segment i starts from the one in block ``reads[i]``, or from zeros where ``is_first[i]``, and its last
state goes to block ``writes[i]``, which may be the same. ``reads, writes: [n]`` int64, ``is_first: [n]`` bool. States
are changed in place, and returned too. Nothing here asks the host what a tensor holds, so that steps can be recorded.
"""

from __future__ import annotations

from typing import Any

import torch

from inferplane.api.op import declare_op, random_tensor

CHUNK_TOKENS = 64
"""Tokens whose influence on one another is computed as one matrix."""


def _round() -> tuple[torch.Tensor, ...]:
    """Three segments: a new request, one that goes on in another block, one that stays."""
    return torch.tensor([0, 2, 3]), torch.tensor([4, 1, 3]), torch.tensor([True, False, False])


def _before(states: torch.Tensor, reads: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
    """The states that segments start from; what a block held before is nobody's, and may be no number."""
    before = states[reads]
    return before.masked_fill(is_first.view(-1, *[1] * (before.dim() - 1)), 0)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _causal_conv1d_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    weight, bias = random_tensor(g, dtype, 24, 4), random_tensor(g, dtype, 24)
    return random_tensor(g, dtype, 3, 70, 24), weight, bias, random_tensor(g, dtype, 5, 24, 3), *_round()


@declare_op(_causal_conv1d_inputs, overwrites=(3,))
def causal_conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    is_first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each channel's weighted sum over a token and the ``width - 1`` before it.

    ``x: [n, length, channels]``, ``weight: [channels, width]`` with the token's own factor last, ``bias: [channels]``,
    ``states: [num_blocks, channels, width - 1]`` the inputs before. Returns y like x, and states.
    """
    length = x.shape[1]
    inputs = torch.cat([_before(states, reads, is_first).to(x.dtype), x.transpose(1, 2)], dim=2)
    out = torch.nn.functional.conv1d(inputs, weight.unsqueeze(1), bias, groups=len(weight))
    states[writes] = inputs[:, :, length:].to(states.dtype)
    return out.transpose(1, 2), states


def _ssm_scan_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    x, steps = random_tensor(g, dtype, 3, 70, 4, 8), torch.rand(3, 70, 4, generator=g) * 0.5
    b, c = (random_tensor(g, dtype, 3, 70, 2, 6) for _ in range(2))
    return x, steps, -torch.rand(4, generator=g), b, c, torch.randn(5, 4, 8, 6, generator=g), *_round()


@declare_op(_ssm_scan_inputs, overwrites=(5,))
def ssm_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    is_first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selective state space of Mamba 2 (arXiv:2405.21060), token after token in each head:
    ``state = exp(steps * decay) * state + steps * outer(x, b)`` and ``y = state @ c``.

    ``x: [n, length, num_heads, head_dim]``, ``steps: [n, length, num_heads]`` and ``decay: [num_heads]`` float32,
    ``b, c: [n, length, num_groups, state_size]`` each for ``num_heads / num_groups`` neighbouring heads,
    ``states: [num_blocks, num_heads, head_dim, state_size]`` float32. Computed in float32 (float64 for float64).
    Returns y like x, and states.
    """
    wide = _wide(x.dtype)
    per_group = x.shape[2] // b.shape[2]
    keys, queries = (each.to(wide).repeat_interleave(per_group, dim=2) for each in (b, c))
    values = x.to(wide) * steps.to(wide).unsqueeze(-1)
    rates = steps.to(wide) * decay.to(wide)
    state = _before(states, reads, is_first).to(wide)
    out = torch.empty_like(x)
    for start in range(0, x.shape[1], CHUNK_TOKENS):
        at = (slice(None), slice(start, start + CHUNK_TOKENS))
        out[at], state = _scan_chunk(values[at], rates[at], keys[at], queries[at], state)
    states[writes] = state.to(states.dtype)
    return out, states


def _scan_chunk(
    values: torch.Tensor, rates: torch.Tensor, keys: torch.Tensor, queries: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """``values: [n, length, heads, head_dim]``, ``rates: [n, length, heads]``, ``keys, queries: [n, length, heads,
    state_size]``."""
    total = rates.cumsum(1)
    influence = torch.einsum("nihs,njhs->nhij", queries, keys) * _decay_between(total)
    own = torch.einsum("nhij,njhd->nihd", influence, values)
    earlier = torch.einsum("nihs,nhds,nih->nihd", queries, state, total.exp())
    left = (total[:, -1:] - total).exp()
    added = torch.einsum("njhd,njhs,njh->nhds", values, keys, left)
    return own + earlier, state * total[:, -1, :, None, None].exp() + added


def _decay_between(total: torch.Tensor) -> torch.Tensor:
    """``[n, heads, length, length]``: what is left of token j at token i, from running sums of logarithms
    ``[n, length, heads]``; nothing of later tokens."""
    total = total.transpose(1, 2)
    between = total.unsqueeze(3) - total.unsqueeze(2)
    is_later = torch.ones(between.shape[2:], dtype=torch.bool, device=total.device).triu(1)
    return between.masked_fill(is_later, -torch.inf).exp()


def _selective_scan_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    x, steps = random_tensor(g, dtype, 3, 20, 16), torch.rand(3, 20, 16, generator=g) * 0.5
    b, c = (random_tensor(g, dtype, 3, 20, 6) for _ in range(2))
    return x, steps, -torch.rand(16, 6, generator=g), b, c, torch.randn(5, 16, 6, generator=g), *_round()


@declare_op(_selective_scan_inputs, overwrites=(5,))
def selective_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    decay: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    is_first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The selective state space of Mamba (arXiv:2312.00752), token after token in each channel:
    ``state = exp(steps * decay) * state + steps * x * b`` and ``y = state @ c``.

    ``x: [n, length, channels]``, ``steps`` the same in float32, ``decay: [channels, state_size]`` float32,
    ``b, c: [n, length, state_size]``, ``states: [num_blocks, channels, state_size]`` float32. Computed in float32
    (float64 for float64). Returns y like x, and states.
    """
    wide = _wide(x.dtype)
    rates, keys, queries = steps.to(wide), b.to(wide), c.to(wide)
    values = x.to(wide) * rates
    state = _before(states, reads, is_first).to(wide)
    out = torch.empty_like(x)
    for token in range(x.shape[1]):
        kept = torch.exp(rates[:, token].unsqueeze(-1) * decay.to(wide))
        state = kept * state + values[:, token].unsqueeze(-1) * keys[:, token].unsqueeze(1)
        out[:, token] = torch.einsum("ncs,ns->nc", state, queries[:, token])
    states[writes] = state.to(states.dtype)
    return out, states


def _gated_delta_rule_inputs(g: torch.Generator, dtype: torch.dtype) -> tuple[Any, ...]:
    q, k = (random_tensor(g, dtype, 3, 70, 2, 6) for _ in range(2))
    v, log_decay = random_tensor(g, dtype, 3, 70, 4, 8), -torch.rand(3, 70, 4, generator=g)
    beta = random_tensor(g, dtype, 3, 70, 4).sigmoid()
    return q, k, v, log_decay, beta, torch.randn(5, 4, 6, 8, generator=g), *_round()


@declare_op(_gated_delta_rule_inputs, overwrites=(5,))
def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    is_first: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gated delta rule (arXiv:2412.06464), token after token in each head of v, with q and k of length one:
    ``state = exp(log_decay) * state``, ``state += outer(k, beta * (v - k @ state))`` and
    ``y = key_dim ** -0.5 * q @ state``.

    ``q, k: [n, length, num_key_heads, key_dim]``, divided by their lengths here, each for ``num_heads /
    num_key_heads`` neighbouring heads, ``v: [n, length, num_heads, value_dim]``, ``log_decay: [n, length, num_heads]``
    float32 and at most 0, ``beta: [n, length, num_heads]``, ``states: [num_blocks, num_heads, key_dim, value_dim]``
    float32. Computed in float32 (float64 for float64). Returns y like v, and states.
    """
    wide = _wide(v.dtype)
    per_key = v.shape[2] // k.shape[2]
    queries, keys = (_unit(each.to(wide)).repeat_interleave(per_key, dim=2) for each in (q, k))
    queries = queries * q.shape[-1] ** -0.5
    values, rates, strengths = v.to(wide), log_decay.to(wide), beta.to(wide).unsqueeze(-1)
    state = _before(states, reads, is_first).to(wide)
    out = torch.empty_like(v)
    for start in range(0, v.shape[1], CHUNK_TOKENS):
        at = (slice(None), slice(start, start + CHUNK_TOKENS))
        out[at], state = _delta_chunk(queries[at], keys[at], values[at], rates[at], strengths[at], state)
    states[writes] = state.to(states.dtype)
    return out, states


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _delta_chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rates: torch.Tensor,
    strengths: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Shapes as in `gated_delta_rule`, with as many heads of q and k as of v, and ``strengths: [..., heads, 1]``.

    What token i adds to the state is ``outer(keys[i], written[i])``, and what it finds there of its key depends on what
    the tokens before it wrote: one triangular system for all of them.
    """
    total = rates.cumsum(1)
    between, since_start = _decay_between(total), total.exp().unsqueeze(-1)
    found = torch.einsum("nihk,njhk->nhij", keys * strengths, keys) * between
    missing = strengths * (values - since_start * torch.einsum("nihk,nhkd->nihd", keys, state))
    # the diagonal, which a unitriangular solve takes to be one, is not read
    written = torch.linalg.solve_triangular(
        found, missing.transpose(1, 2), upper=False, unitriangular=True
    ).transpose(1, 2)
    influence = torch.einsum("nihk,njhk->nhij", queries, keys) * between
    own = torch.einsum("nhij,njhd->nihd", influence, written)
    earlier = since_start * torch.einsum("nihk,nhkd->nihd", queries, state)
    left = (total[:, -1:] - total).exp().unsqueeze(-1)
    added = torch.einsum("njhk,njhd->nhkd", keys * left, written)
    return own + earlier, state * total[:, -1, :, None, None].exp() + added
