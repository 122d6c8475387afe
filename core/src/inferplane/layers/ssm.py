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
    ) -> None:
        """``num_groups``: of heads that share the matrices b and c, and of the norm; ``step_limits``: what a step is
        clamped to."""
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
        self._norm_weight = torch.empty(inner, dtype=ctx.dtype, device=ctx.device)
        super().__init__(
            ctx, prefix, MambaSpec, [self.conv.state, ((num_heads, head_dim, state_size), "float32")]
        )
        self._scan = ctx.ops.ssm_scan

    def weight_slots(self) -> Sequence[WeightSlot]:
        tensors = {"D": self._skip, "dt_bias": self._step_bias, "norm.weight": self._norm_weight}
        return [
            *(WeightSlot(f"{self._prefix}.{name}", tuple(x.shape), x.copy_) for name, x in tensors.items()),
            WeightSlot(f"{self._prefix}.A_log", tuple(self._decay.shape), self._copy_decay),
        ]

    def _copy_decay(self, tensor: torch.Tensor) -> None:
        self._decay.copy_(-tensor.float().exp())

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        gate, mixed, steps = self.in_proj(hidden).split(self._sizes, dim=-1)
        y = self.mix((mixed, steps), batch)
        return self.out_proj(self._norm(y, gate))

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

    def _norm(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm of each group after gating, in float32."""
        gated = (y * silu(gate.float())).unflatten(-1, (self._shared_shape[0], -1))
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._norm_weight * normed.flatten(1).to(gate.dtype)


def check_one_rank(ctx: BuildContext, prefix: str) -> None:
    """Raises `ConfigError` where there are more."""
    if ctx.comm.world_size > 1:
        raise ConfigError(
            "tensor_parallel_size",
            f"{prefix}: state-space layers run on one rank, not {ctx.comm.world_size}",
        )
