"""State-space layers: a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu, softplus

from inferplane.api.kv import MambaSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.state import StateRound
from inferplane.config import ConfigError
from inferplane.layers.layer import WeightSlot
from inferplane.layers.linear import ReplicatedLinear
from inferplane.layers.parallel import whole
from inferplane.layers.state_mixer import CausalConvolution, StateMixer


class StateSpaceMixer(StateMixer):
    """Convolution, selective state space with heads (arXiv:2405.21060), gated norm, between two projections.

    Raises `ConfigError` for more than one rank.
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
        check_one_rank(ctx, prefix)
        inner, shared = num_heads * head_dim, num_groups * state_size
        self._prefix = prefix
        self._sizes = (inner, inner + 2 * shared, num_heads)
        self._inner_sizes = (inner, shared, shared)
        self._shape = (num_heads, head_dim)
        self._shared_shape = (num_groups, state_size)
        self._eps = eps
        self._step_limits = step_limits
        self.in_proj = ReplicatedLinear(ctx, f"{prefix}.in_proj", hidden_size, sum(self._sizes), bias=bias)
        self.conv = CausalConvolution(
            ctx, f"{prefix}.conv1d", whole(self._sizes[1]), conv_width, bias=conv_bias
        )
        self.out_proj = ReplicatedLinear(ctx, f"{prefix}.out_proj", inner, hidden_size, bias=bias)
        self._decay, self._skip, self._step_bias = (
            torch.empty(num_heads, dtype=torch.float32, device=ctx.device) for _ in range(3)
        )
        self._norm_weight = torch.empty(inner, dtype=ctx.dtype, device=ctx.device) if has_norm else None
        sizes = (inner, *self._inner_sizes, num_heads)
        factors = [torch.full((size,), scale) for size, scale in zip(sizes, scales)]
        is_scaled = any(scale != 1.0 for scale in scales)
        self._scales = torch.cat(factors).to(ctx.device, ctx.dtype) if is_scaled else None
        super().__init__(
            ctx, prefix, MambaSpec, [self.conv.state, ((num_heads, head_dim, state_size), "float32")]
        )
        self._scan = ctx.ops.ssm_scan

    def weight_slots(self) -> Sequence[WeightSlot]:
        tensors = {"D": self._skip, "dt_bias": self._step_bias}
        if self._norm_weight is not None:
            tensors["norm.weight"] = self._norm_weight
        return [
            *(WeightSlot(f"{self._prefix}.{name}", tuple(x.shape), x.copy_) for name, x in tensors.items()),
            WeightSlot(f"{self._prefix}.A_log", tuple(self._decay.shape), self._copy_decay),
        ]

    def _copy_decay(self, tensor: torch.Tensor) -> None:
        self._decay.copy_(-tensor.float().exp())

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
        groups = y.unflatten(-1, (self._shared_shape[0], -1))
        normed = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._norm_weight * normed.flatten(1).to(self._norm_weight.dtype)


def check_one_rank(ctx: BuildContext, prefix: str) -> None:
    """Raises `ConfigError` where there are more."""
    if ctx.comm.world_size > 1:
        raise ConfigError(
            "tensor_parallel_size",
            f"{prefix}: state-space layers run on one rank, not {ctx.comm.world_size}",
        )
