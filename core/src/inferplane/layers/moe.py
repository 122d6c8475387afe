"""A mixture of experts in place of a feed-forward block."""

from __future__ import annotations

import torch

from inferplane.layers.experts import Experts
from inferplane.layers.layer import Layer
from inferplane.layers.linear import Linear
from inferplane.layers.router import Router


class SparseMoE(Layer):
    """Each token through the experts that its router chose and, where there is one, through the shared expert.

    ``shared_gate`` maps a token to one number, whose sigmoid multiplies what the shared expert answers. With
    ``weighs_input`` the router's weight of a token's only expert multiplies what goes in, not what comes out.
    """

    def __init__(
        self,
        router: Router,
        experts: Experts,
        shared: Layer | None = None,
        shared_gate: Linear | None = None,
        *,
        weighs_input: bool = False,
    ) -> None:
        if weighs_input and router.routing.top_k != 1:
            raise ValueError("a token that goes to several experts has no one input to weigh")
        self._weighs_input = weighs_input
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        weights, ids = self.router(hidden)
        if self._weighs_input:
            out = self.experts((hidden * weights).to(hidden.dtype), torch.ones_like(weights), ids)
        else:
            out = self.experts(hidden, weights, ids)
        if self.shared is None:
            return out
        shared = self.shared(hidden)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(hidden).sigmoid()
        return out + shared
