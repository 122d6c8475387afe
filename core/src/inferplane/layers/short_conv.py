"""Gated short convolutions: a state that holds the last few tokens' inputs, and nothing older."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from inferplane.api.kv import StateSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.state import StateRound
from inferplane.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from inferplane.layers.parallel import even_share
from inferplane.layers.state_mixer import CausalConvolution, StateMixer


class ShortConvolution(StateMixer):
    """``out_proj(c * conv(b * x))`` with b, c and x from ``in_proj``. Channels are split over the ranks."""

    def __init__(
        self, ctx: BuildContext, prefix: str, hidden_size: int, *, conv_width: int, bias: bool
    ) -> None:
        parts = dict.fromkeys(("b", "c", "x"), hidden_size)
        self.in_proj = MergedColumnParallelLinear(
            ctx, prefix, hidden_size, parts, bias=bias, fused_name="in_proj"
        )
        channels = even_share(hidden_size, ctx.comm, f"{prefix}: channels")
        self.conv = CausalConvolution(ctx, f"{prefix}.conv", channels, conv_width, bias=bias)
        self.out_proj = RowParallelLinear(ctx, f"{prefix}.out_proj", hidden_size, hidden_size, bias=bias)
        super().__init__(ctx, prefix, StateSpec, [self.conv.state])

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        b, c, x = self.in_proj(hidden).chunk(3, dim=-1)
        return self.out_proj(c * self.mix((b * x,), batch))

    def advance(
        self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], about: StateRound
    ) -> torch.Tensor:
        return self.conv(inputs[0], states[0], about)
