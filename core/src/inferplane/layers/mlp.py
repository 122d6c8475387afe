"""Feed-forward blocks."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.activation import GatedActivation
from inferplane.layers.layer import Layer
from inferplane.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(Layer):
    """``down(act(gate(x)) * up(x))``, with ``gate_proj``, ``up_proj`` and ``down_proj`` below ``prefix``."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
    ) -> None:
        self.gate_up_proj = MergedColumnParallelLinear(
            ctx,
            prefix,
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
        )
        self.act = GatedActivation(ctx, activation)
        self.down_proj = RowParallelLinear(
            ctx, f"{prefix}.down_proj", intermediate_size, hidden_size, bias=bias
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        return self.down_proj(self.act(self.gate_up_proj(hidden)))
