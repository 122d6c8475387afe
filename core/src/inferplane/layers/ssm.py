"""State-space layers: a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import silu, softplus

from inferplane.api.kv import MambaSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.state import StateLayer, StateSegments, state_views
from inferplane.config import ConfigError
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.linear import ReplicatedLinear

CHECKPOINT_TOKENS = 512
"""Distance of the states that other requests may start from; a state is as large as hundreds of tokens' keys."""


class Mamba2Mixer(Layer):
    """The mixer of Mamba 2 (arXiv:2405.21060): convolution, selective state space, gated norm, between two projections.

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
        if ctx.comm.world_size > 1:
            raise ConfigError(
                "tensor_parallel_size",
                f"{prefix}: state-space layers run on one rank, not {ctx.comm.world_size}",
            )
        inner, shared = num_heads * head_dim, num_groups * state_size
        self._prefix = prefix
        self._sizes = (inner, inner + 2 * shared, num_heads)
        self._inner_sizes = (inner, shared, shared)
        self._shape = (num_heads, head_dim)
        self._shared_shape = (num_groups, state_size)
        self._eps = eps
        self._step_limits = step_limits
        self.in_proj = ReplicatedLinear(ctx, f"{prefix}.in_proj", hidden_size, sum(self._sizes), bias=bias)
        self.out_proj = ReplicatedLinear(ctx, f"{prefix}.out_proj", inner, hidden_size, bias=bias)

        def weight(*shape: int, dtype: torch.dtype = ctx.dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=ctx.device)

        channels = self._sizes[1]
        self._conv_weight = weight(channels, conv_width)
        self._conv_bias = weight(channels) if conv_bias else None
        self._decay, self._skip, self._step_bias = (weight(num_heads, dtype=torch.float32) for _ in range(3))
        self._norm_weight = weight(inner)
        cache = ctx.config.cache
        self.description = StateLayer(
            name=prefix,
            spec=MambaSpec(
                # without prefix caching nobody starts from a checkpoint, and there is one state for each request
                block_size=CHECKPOINT_TOKENS
                if cache.enable_prefix_caching
                else ctx.config.model.max_model_len,
                shapes=((channels, conv_width - 1), (num_heads, head_dim, state_size)),
                dtypes=(ctx.config.model.dtype, "float32"),
            ),
        )
        self._conv, self._scan = ctx.ops.causal_conv1d, ctx.ops.ssm_scan

    def weight_slots(self) -> Sequence[WeightSlot]:
        tensors = {"D": self._skip, "dt_bias": self._step_bias, "norm.weight": self._norm_weight}
        if self._conv_bias is not None:
            tensors["conv1d.bias"] = self._conv_bias
        slots = [WeightSlot(f"{self._prefix}.{name}", tuple(x.shape), x.copy_) for name, x in tensors.items()]
        channels, width = self._conv_weight.shape
        return [
            *slots,
            WeightSlot(f"{self._prefix}.conv1d.weight", (channels, 1, width), self._copy_conv),
            WeightSlot(f"{self._prefix}.A_log", tuple(self._decay.shape), self._copy_decay),
        ]

    def _copy_conv(self, tensor: torch.Tensor) -> None:
        self._conv_weight.copy_(tensor.squeeze(1))

    def _copy_decay(self, tensor: torch.Tensor) -> None:
        self._decay.copy_(-tensor.float().exp())

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        about: StateSegments = batch.metadata[self._prefix]
        conv_states, states = state_views(batch.kv[self._prefix], self.description.spec)
        segments = (about.starts, about.reads, about.writes, about.is_first)
        gate, mixed, steps = self.in_proj(hidden).split(self._sizes, dim=-1)
        mixed, _ = self._conv(mixed, self._conv_weight, self._conv_bias, conv_states, *segments)
        x, b, c = silu(mixed).split(self._inner_sizes, dim=-1)
        x, b, c = x.unflatten(-1, self._shape), *(each.unflatten(-1, self._shared_shape) for each in (b, c))
        steps = softplus(steps.float() + self._step_bias).clamp(*self._step_limits)
        y, _ = self._scan(x, steps, self._decay, b, c, states, *segments)
        y = y.float() + x.float() * self._skip.unsqueeze(-1)
        return self.out_proj(self._norm(y.flatten(1), gate))

    def _norm(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm of each group after gating, in float32."""
        gated = (y * silu(gate.float())).unflatten(-1, (self._shared_shape[0], -1))
        normed = gated * torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + self._eps)
        return self._norm_weight * normed.flatten(1).to(gate.dtype)
