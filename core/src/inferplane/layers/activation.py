"""Activations between the two products of a feed-forward block."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer


class SiluAndMul(Layer):
    """``silu(gate) * up`` where the input has both side by side, as `MergedColumnParallelLinear` makes them."""

    def __init__(self, ctx: BuildContext) -> None:
        self._op = ctx.ops.silu_and_mul

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, 2 * size] -> [num_tokens, size]``"""
        return self._op(gate_up)
