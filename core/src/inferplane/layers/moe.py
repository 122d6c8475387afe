"""A mixture of experts in place of a feed-forward block."""

from __future__ import annotations

import torch

from inferplane.layers.experts import Experts
from inferplane.layers.layer import Layer
from inferplane.layers.linear import Linear
from inferplane.layers.router import Router


class SparseMoE(Layer):
    """Each token through the experts that its router chose and, where there is one, through the shared expert.

    ``shared_gate`` maps a token to one number, whose sigmoid multiplies what the shared expert answers.
    """

    def __init__(
        self, router: Router, experts: Experts, shared: Layer | None = None, shared_gate: Linear | None = None
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        out = self.experts(hidden, *self.router(hidden))
        if self.shared is None:
            return out
        shared = self.shared(hidden)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(hidden).sigmoid()
        return out + shared
