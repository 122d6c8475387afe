"""Feed-forward blocks."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.activation import GatedActivation, activation
from inferplane.layers.layer import Layer
from inferplane.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from inferplane.layers.norm import Norm, RMSNorm


class GatedMLP(Layer):
    """``down(act(gate(x)) * up(x))``, with ``gate_proj``, ``up_proj`` and ``down_proj`` below ``prefix``.

    With ``fused_name`` gate and up are one matrix of that name, the gate first; ``down_name`` is the last one's name.
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
        down_name: str = "down_proj",
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
            ctx, f"{prefix}.{down_name}", intermediate_size, hidden_size, bias=bias
        )

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        fused = self.gate_up_proj.fused
        if fused is not None and self.act.is_silu:
            return self.down_proj(fused.silu_and_mul(hidden))
        return self.down_proj(self.act(self.gate_up_proj(hidden)))

    def after_norm(
        self, norm: Norm, hidden: torch.Tensor, residual: torch.Tensor | None, *, is_bare: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The block applied to ``norm(hidden + residual)``, and that sum; with ``is_bare``, where nothing else is done
        to the block's result, also both in one and None."""
        fused = self.gate_up_proj.fused
        if fused is not None and self.act.is_silu and isinstance(norm, RMSNorm):
            inner, residual = fused.after_add_rms_norm(hidden, residual, norm.weight, norm.eps, is_gated=True)
        else:
            inner, residual = self.gate_up_proj.after_norm(norm, hidden, residual)
            inner = self.act(inner)
        return self.down_proj.beside(residual, inner) if is_bare else (self.down_proj(inner), residual)


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
