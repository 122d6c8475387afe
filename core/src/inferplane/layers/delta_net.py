"""Linear attention whose state is corrected by what it lacks of each new value: the gated delta net."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import silu, softplus

from inferplane.api.kv import LinearAttentionSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.state import StateRound
from inferplane.layers.layer import WeightSlot
from inferplane.layers.linear import Linear, RowParallelLinear
from inferplane.layers.parallel import Rows, Share, even_share, stacked_rows, whole
from inferplane.layers.state_mixer import CausalConvolution, StateMixer


@dataclass(frozen=True)
class DeltaHeads:
    """Of one layer, over all ranks. A key head serves ``num_value_heads / num_key_heads`` neighbouring value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int


class GatedDeltaNet(StateMixer):
    """Convolution, gated delta rule (arXiv:2412.06464), norm and gate of each head, between two projections.

    The checkpoint has the projection's rows by key heads: of each its query, key, values and gates in
    ``in_proj_qkvz``, and its strengths and decays in ``in_proj_ba``. Here they are one matrix, all queries first, then
    all keys and so on. Key heads are split over the ranks.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        hidden_size: int,
        heads: DeltaHeads,
        *,
        conv_width: int,
        eps: float,
    ) -> None:
        keys = even_share(heads.num_key_heads, ctx.comm, f"{prefix}: number of key heads")
        values = keys.scaled(heads.num_value_heads // heads.num_key_heads)
        key_rows, value_rows = keys.scaled(heads.key_dim), values.scaled(heads.value_dim)
        self._prefix = prefix
        self._values = values
        self._eps = eps
        self._sizes = (2 * key_rows.size + value_rows.size, value_rows.size, values.size, values.size)
        self._conv_sizes = (key_rows.size, key_rows.size, value_rows.size)
        self._key_shape, self._value_shape = (keys.size, heads.key_dim), (values.size, heads.value_dim)
        per_key = values.size // keys.size
        qkvz = _rows_by_key_head(keys, (heads.key_dim, heads.key_dim, *[per_key * heads.value_dim] * 2))
        outputs = {
            f"{prefix}.in_proj_qkvz": qkvz,
            f"{prefix}.in_proj_ba": _rows_by_key_head(keys, [per_key] * 2),
        }
        self.in_proj = Linear(ctx, outputs, whole(hidden_size), bias=False)
        channels = stacked_rows((key_rows, key_rows, value_rows))
        self.conv = CausalConvolution(ctx, f"{prefix}.conv1d", channels, conv_width, bias=False)
        self.out_proj = RowParallelLinear(ctx, f"{prefix}.out_proj", value_rows.total, hidden_size)
        self._decay, self._decay_bias = (
            torch.empty(values.size, dtype=torch.float32, device=ctx.device) for _ in range(2)
        )
        self._norm_weight = torch.empty(heads.value_dim, dtype=ctx.dtype, device=ctx.device)
        state = (values.size, heads.key_dim, heads.value_dim), "float32"
        super().__init__(ctx, prefix, LinearAttentionSpec, [self.conv.state, state])
        self._rule = ctx.ops.gated_delta_rule

    def weight_slots(self) -> Sequence[WeightSlot]:
        total = (self._values.total,)
        return [
            WeightSlot(f"{self._prefix}.A_log", total, self._copy_decay),
            WeightSlot(f"{self._prefix}.dt_bias", total, self._copy_decay_bias),
            WeightSlot(f"{self._prefix}.norm.weight", self._value_shape[1:], self._norm_weight.copy_),
        ]

    def _copy_decay(self, tensor: torch.Tensor) -> None:
        self._decay.copy_(-tensor[self._values.span].float().exp())

    def _copy_decay_bias(self, tensor: torch.Tensor) -> None:
        self._decay_bias.copy_(tensor[self._values.span])

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """``[num_tokens, hidden_size]`` to the same."""
        mixed, gate, strength, decay = self.in_proj(hidden).split(self._sizes, dim=-1)
        y = self.mix((mixed, strength, decay), batch)
        return self.out_proj(self._norm(y, gate.unflatten(-1, self._value_shape)).flatten(1))

    def advance(
        self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], about: StateRound
    ) -> torch.Tensor:
        mixed, strength, decay = inputs
        q, k, v = silu(self.conv(mixed, states[0], about)).split(self._conv_sizes, dim=-1)
        q, k = (each.unflatten(-1, self._key_shape) for each in (q, k))
        log_decay = self._decay * softplus(decay.float() + self._decay_bias)
        y, _ = self._rule(
            q,
            k,
            v.unflatten(-1, self._value_shape),
            log_decay,
            strength.sigmoid(),
            states[1],
            about.reads,
            about.writes,
            about.is_first,
        )
        return y

    def _norm(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Root-mean-square norm of each head, and then the gate, in float32."""
        wide = y.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)
        weighted = self._norm_weight * normed.to(y.dtype)
        return (weighted * silu(gate.float())).to(y.dtype)


def _rows_by_key_head(keys: Share, sizes: Sequence[int]) -> Rows:
    """The rows of these key heads in a matrix that has for each of them ``sizes`` rows of each kind, kind by kind."""
    stride, offset, kinds = sum(sizes), 0, []
    for size in sizes:
        heads = torch.arange(keys.start, keys.start + keys.size).unsqueeze(1)
        kinds.append((heads * stride + offset + torch.arange(size)).flatten())
        offset += size
    return Rows(keys.total * stride, torch.cat(kinds))
