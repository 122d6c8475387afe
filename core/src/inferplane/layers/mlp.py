"""Feed-forward blocks."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.activation import GatedActivation, activation
from inferplane.layers.layer import Layer
from inferplane.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(Layer):
    """``down(act(gate(x)) * up(x))``, with ``gate_proj``, ``up_proj`` and ``down_proj`` below ``prefix``.

    With ``fused_name`` gate and up are one matrix of that name, the gate first.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: str = "silu",
        fused_name: str | None = None,
    ) -> None:
        self.gate_up_proj = MergedColumnParallelLinear(
            ctx,
            prefix,
            hidden_size,
            {"gate_proj": intermediate_size, "up_proj": intermediate_size},
            bias=bias,
            fused_name=fused_name,
        )
        self.act = GatedActivation(ctx, activation)
        self.down_proj = RowParallelLinear(
            ctx, f"{prefix}.down_proj", intermediate_size, hidden_size, bias=bias
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        return self.down_proj(self.act(self.gate_up_proj(hidden)))


class MLP(Layer):
    """``down(act(up(x)))``; ``up`` and ``down`` name the tensors below ``prefix``."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        intermediate_size: int,
        *,
        up: str,
        down: str,
        activation_name: str,
        bias: bool = True,
        is_transposed: bool = False,
    ) -> None:
        self.up_proj = ColumnParallelLinear(
            ctx,
            f"{prefix}.{up}",
            hidden_size,
            intermediate_size,
            bias=bias,
            is_transposed=is_transposed,
        )
        self.act = activation(activation_name)
        self.down_proj = RowParallelLinear(
            ctx,
            f"{prefix}.{down}",
            intermediate_size,
            hidden_size,
            bias=bias,
            is_transposed=is_transposed,
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        return self.down_proj(self.act(self.up_proj(hidden)))
