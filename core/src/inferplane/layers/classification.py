"""What makes class logits of a pooled hidden state."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.activation import activation
from inferplane.layers.layer import Layer
from inferplane.layers.linear import ReplicatedLinear
from inferplane.layers.norm import Norm


class ClassificationHead(Layer):
    """``out(norm(act(dense(x))))``; without ``dense`` only ``out``. ``dense`` and ``out`` name the tensors."""

    def __init__(
        self,
        ctx: BuildContext,
        hidden_size: int,
        num_labels: int,
        *,
        out: str,
        out_bias: bool = True,
        dense: str | None = None,
        dense_bias: bool = True,
        activation_name: str = "tanh",
        norm: Norm | None = None,
    ) -> None:
        self.dense = None
        if dense is not None:
            self.dense = ReplicatedLinear(ctx, dense, hidden_size, hidden_size, bias=dense_bias)
        self.act = activation(activation_name)
        self.norm = norm
        self.out = ReplicatedLinear(ctx, out, hidden_size, num_labels, bias=out_bias)

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """``[n, hidden_size] -> [n, num_labels]``"""
        if self.dense is not None:
            pooled = self.act(self.dense(pooled))
        return self.out(pooled if self.norm is None else self.norm(pooled))
