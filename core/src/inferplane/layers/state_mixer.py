"""What layers with a state in place of keys and values have in common, whatever the state is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from inferplane.api.kv import StateSpec
from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.api.state import StateLayer, StateRound, state_views
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.parallel import Rows, Share

CHECKPOINT_TOKENS = 512
"""Distance of the states that other requests may start from; a state is as large as hundreds of tokens' keys."""


class StateMixer(Layer):
    """Mixes each token with what the state has of those before it, one round of segments after another."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        spec: type[StateSpec],
        tensors: Sequence[tuple[tuple[int, ...], str]],
    ) -> None:
        """``tensors``: shape and dtype of each that makes up a state on this rank."""
        # without prefix caching nobody starts from a checkpoint, and there is one state for each request
        cache = ctx.config.cache
        distance = CHECKPOINT_TOKENS if cache.enable_prefix_caching else ctx.config.model.max_model_len
        self.description = StateLayer(
            name=prefix,
            spec=spec(
                block_size=distance,
                shapes=tuple(shape for shape, _ in tensors),
                dtypes=tuple(dtype for _, dtype in tensors),
            ),
        )

    def mix(self, inputs: Sequence[torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
        """``advance`` over all tokens of the step: ``[num_tokens, ...]`` of each input to ``[num_tokens, ...]``."""
        name = self.description.name
        rounds: tuple[StateRound, ...] = batch.metadata[name]
        states = state_views(batch.kv[name], self.description.spec)
        if len(rounds) == 1:
            [only] = rounds
            parts = [each.unflatten(0, only.rows.shape) for each in inputs]
            return self.advance(parts, states, only).flatten(0, 1)
        out: torch.Tensor | None = None
        for each_round in rounds:
            mixed = self.advance([each[each_round.rows] for each in inputs], states, each_round)
            if out is None:
                out = mixed.new_empty(len(inputs[0]), *mixed.shape[2:])
            out[each_round.rows] = mixed
        assert out is not None
        return out

    @abstractmethod
    def advance(
        self, inputs: Sequence[torch.Tensor], states: Sequence[torch.Tensor], about: StateRound
    ) -> torch.Tensor:
        """One round: ``[num_segments, length, ...]`` of each input to the same of the output.

        ``states: [num_blocks, *shape]`` of each of the state's tensors, which it changes in place.
        """


class CausalConvolution(Layer):
    """A convolution of each channel over the last ``width`` tokens; its state is the inputs of all but the newest."""

    def __init__(
        self, ctx: BuildContext, prefix: str, channels: Share | Rows, width: int, *, bias: bool
    ) -> None:
        """``channels`` are this rank's of the checkpoint's."""
        self._prefix = prefix
        self._channels = channels
        self._weight = torch.empty(channels.size, width, dtype=ctx.dtype, device=ctx.device)
        self._bias = torch.empty(channels.size, dtype=ctx.dtype, device=ctx.device) if bias else None
        self._conv = ctx.ops.causal_conv1d
        self.state = (channels.size, width - 1), ctx.config.model.dtype

    def weight_slots(self) -> Sequence[WeightSlot]:
        total, width = self._channels.total, self._weight.shape[1]
        slots = [WeightSlot(f"{self._prefix}.weight", (total, 1, width), self._copy_weight)]
        if self._bias is not None:
            slots.append(WeightSlot(f"{self._prefix}.bias", (total,), self._copy_bias))
        return slots

    def _copy_weight(self, tensor: torch.Tensor) -> None:
        self._weight.copy_(tensor.squeeze(1)[self._channels.span])

    def _copy_bias(self, tensor: torch.Tensor) -> None:
        assert self._bias is not None
        self._bias.copy_(tensor[self._channels.span])

    def __call__(self, x: torch.Tensor, states: torch.Tensor, about: StateRound) -> torch.Tensor:
        """``[num_segments, length, channels]`` to the same."""
        y, _ = self._conv(x, self._weight, self._bias, states, about.reads, about.writes, about.is_first)
        return y
