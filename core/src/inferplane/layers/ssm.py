"""State-space layers: a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn.functional import silu, softplus

from inferplane.api.kv import MambaSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.state import StateRound
from inferplane.layers.layer import WeightSlot
from inferplane.layers.linear import Linear, RowParallelLinear
from inferplane.layers.parallel import Share, even_share, kv_head_share, stacked_parts, whole
from inferplane.layers.state_mixer import CausalConvolution, StateMixer


class StateSpaceMixer(StateMixer):
    """Convolution, selective state space with heads (arXiv:2405.21060), gated norm, between two projections.

    Heads are split over the ranks, and with them the groups that they share b and c in; where there are fewer groups
    than ranks, neighbouring ranks have the same one.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        *,
        num_heads: int,
        head_dim: int,
        num_groups: int,
        state_size: int,
        conv_width: int,
        eps: float,
        bias: bool = False,
        conv_bias: bool = True,
        step_limits: tuple[float, float] = (0.0, float("inf")),
        has_norm: bool = True,
        scales: Sequence[float] = (1.0, 1.0, 1.0, 1.0, 1.0),
    ) -> None:
        """``num_groups``: of heads that share the matrices b and c, and of the norm; ``step_limits``: what a step is
        clamped to; without ``has_norm`` the gate alone follows; ``scales``: factors on the projection's gate, x, b, c
        and steps."""
        heads = even_share(num_heads, ctx.comm, f"{prefix}: number of heads")
        groups = kv_head_share(num_groups, ctx.comm, f"{prefix}: number of groups")
        inner, shared = heads.scaled(head_dim), groups.scaled(state_size)
        channels = (inner, shared, shared)
        self._prefix = prefix
        self._comm = ctx.comm
        self._heads, self._inner, self._groups = heads, inner, groups
        self._sizes = (inner.size, inner.size + 2 * shared.size, heads.size)
        self._inner_sizes = tuple(share.size for share in channels)
        self._shape = (heads.size, head_dim)
        self._shared_shape = (groups.size, state_size)
        self._eps = eps
        self._step_limits = step_limits
        rows = stacked_parts((inner, *channels, heads), ctx.comm)
        self.in_proj = Linear(ctx, {f"{prefix}.in_proj": rows}, whole(hidden_size), bias=bias)
        self.conv = CausalConvolution(
            ctx, f"{prefix}.conv1d", stacked_parts(channels, ctx.comm), conv_width, bias=conv_bias
        )
        self.out_proj = RowParallelLinear(ctx, f"{prefix}.out_proj", inner.total, hidden_size, bias=bias)
        self._decay, self._skip, self._step_bias = (
            torch.empty(heads.size, dtype=torch.float32, device=ctx.device) for _ in range(3)
        )
        self._norm_weight = torch.empty(inner.size, dtype=ctx.dtype, device=ctx.device) if has_norm else None
        sizes = (inner.size, *self._inner_sizes, heads.size)
        factors = [torch.full((size,), scale) for size, scale in zip(sizes, scales)]
        is_scaled = any(scale != 1.0 for scale in scales)
        self._scales = torch.cat(factors).to(ctx.device, ctx.dtype) if is_scaled else None
        super().__init__(
            ctx, prefix, MambaSpec, [self.conv.state, ((heads.size, head_dim, state_size), "float32")]
        )
        self._scan = ctx.ops.ssm_scan

    def weight_slots(self) -> Sequence[WeightSlot]:
        heads, inner = self._heads, self._inner
        parts = {"D": (self._skip, heads), "dt_bias": (self._step_bias, heads)}
        if self._norm_weight is not None:
            parts["norm.weight"] = (self._norm_weight, inner)
        slots = [
            WeightSlot(f"{self._prefix}.{name}", (share.total,), partial(_copy_part, own, share))
            for name, (own, share) in parts.items()
        ]
        return [*slots, WeightSlot(f"{self._prefix}.A_log", (heads.total,), self._copy_decay)]

    def _copy_decay(self, tensor: torch.Tensor) -> None:
        self._decay.copy_(-tensor[self._heads.span].float().exp())

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        projected = self.in_proj(hidden)
        if self._scales is not None:
            projected = projected * self._scales
        gate, mixed, steps = projected.split(self._sizes, dim=-1)
        y = self.mix((mixed, steps), batch) * silu(gate.float())
        return self.out_proj(self._normed(y).to(hidden.dtype))

    def advance(
        self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], about: StateRound
    ) -> torch.Tensor:
        mixed, steps = inputs
        mixed = silu(self.conv(mixed, states[0], about))
        x, b, c = mixed.split(self._inner_sizes, dim=-1)
        x, b, c = x.unflatten(-1, self._shape), *(each.unflatten(-1, self._shared_shape) for each in (b, c))
        steps = softplus(steps.float() + self._step_bias).clamp(*self._step_limits)
        y, _ = self._scan(x, steps, self._decay, b, c, states[1], about.reads, about.writes, about.is_first)
        return (y.float() + x.float() * self._skip.unsqueeze(-1)).flatten(2)

    def _normed(self, y: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm of each group, in float32."""
        if self._norm_weight is None:
            return y
        own = y.unflatten(-1, (self._groups.size, -1))
        squares = self._over_ranks(own.pow(2).sum(-1, keepdim=True))
        mean = squares / (self._inner.total // self._groups.total)
        normed = own * torch.rsqrt(mean + self._eps)
        return self._norm_weight * normed.flatten(1).to(self._norm_weight.dtype)

    def _over_ranks(self, sums: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, own groups, 1]`` with what the other ranks that have a part of these groups add."""
        if self._groups.total % self._comm.world_size == 0:  # each has its groups whole
            return sums
        of_all = sums.new_zeros(len(sums), self._groups.total, 1)
        of_all[:, self._groups.span] = sums
        return self._comm.all_reduce(of_all)[:, self._groups.span]


def _copy_part(own: torch.Tensor, share: Share, tensor: torch.Tensor) -> None:
    own.copy_(tensor[share.span])
