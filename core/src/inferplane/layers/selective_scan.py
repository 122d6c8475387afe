"""State-space layers whose channels each decay in their own way in every dimension of the state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from inferplane.api.kv import MambaSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.state import StateRound
from inferplane.layers.layer import WeightSlot
from inferplane.layers.linear import ColumnParallelLinear, Linear, RowParallelLinear
from inferplane.layers.norm import Norm
from inferplane.layers.parallel import even_share, stacked_parts, whole
from inferplane.layers.state_mixer import CausalConvolution, StateMixer


@dataclass(frozen=True)
class SelectiveShape:
    """Of one layer."""

    inner_size: int
    state_size: int
    step_rank: int
    """Of the product that makes the steps."""
    conv_width: int


class SelectiveScanMixer(StateMixer):
    """Convolution, selective state space of single channels (arXiv:2312.00752) and gate, between two projections.

    ``norms`` are of the steps, b and c, where a model has them. Channels are split over the ranks; the steps' rank, b
    and c are made of all channels, and so are the same on every rank.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        shape: SelectiveShape,
        *,
        bias: bool = False,
        conv_bias: bool = True,
        norms: tuple[Norm, Norm, Norm] | None = None,
    ) -> None:
        inner = even_share(shape.inner_size, ctx.comm, f"{prefix}: inner size")
        state = shape.state_size
        self._prefix = prefix
        self._inner = inner
        self._sizes = (shape.step_rank, state, state)
        self.norms = norms
        rows = stacked_parts((inner, inner), ctx.comm)
        self.in_proj = Linear(ctx, {f"{prefix}.in_proj": rows}, whole(hidden_size), bias=bias)
        self.conv = CausalConvolution(ctx, f"{prefix}.conv1d", inner, shape.conv_width, bias=conv_bias)
        self.x_proj = RowParallelLinear(ctx, f"{prefix}.x_proj", inner.total, sum(self._sizes))
        self.step_proj = ColumnParallelLinear(
            ctx, f"{prefix}.dt_proj", shape.step_rank, inner.total, bias=True
        )
        self.out_proj = RowParallelLinear(ctx, f"{prefix}.out_proj", inner.total, hidden_size, bias=bias)
        self._decay = torch.empty(inner.size, state, dtype=torch.float32, device=ctx.device)
        self._skip = torch.empty(inner.size, dtype=torch.float32, device=ctx.device)
        super().__init__(ctx, prefix, MambaSpec, [self.conv.state, ((inner.size, state), "float32")])
        self._scan = ctx.ops.selective_scan

    def weight_slots(self) -> Sequence[WeightSlot]:
        total = self._inner.total
        return [
            WeightSlot(f"{self._prefix}.A_log", (total, self._decay.shape[1]), self._copy_decay),
            WeightSlot(f"{self._prefix}.D", (total,), self._copy_skip),
        ]

    def _copy_decay(self, tensor: torch.Tensor) -> None:
        self._decay.copy_(-tensor[self._inner.span].float().exp())

    def _copy_skip(self, tensor: torch.Tensor) -> None:
        self._skip.copy_(tensor[self._inner.span])

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        mixed, gate = self.in_proj(hidden).split(self._inner.size, dim=-1)
        y = self.mix((mixed,), batch) * silu(gate.float())
        return self.out_proj(y.to(hidden.dtype))

    def advance(
        self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], about: StateRound
    ) -> torch.Tensor:
        x = silu(self.conv(inputs[0], states[0], about))
        steps, b, c = self.x_proj(x.flatten(0, 1)).split(self._sizes, dim=-1)
        if self.norms is not None:
            steps, b, c = (norm(each.contiguous()) for norm, each in zip(self.norms, (steps, b, c)))
        steps = softplus(self.step_proj(steps).float())
        steps, b, c = (each.unflatten(0, x.shape[:2]) for each in (steps, b, c))
        y, _ = self._scan(x, steps, self._decay, b, c, states[1], about.reads, about.writes, about.is_first)
        return y.float() + x.float() * self._skip
