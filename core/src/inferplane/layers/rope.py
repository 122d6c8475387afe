"""Rotary position embedding."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer
from inferplane.models.rope_config import RopeConfig, inverse_frequencies


class RotaryEmbedding(Layer):
    """Rotates queries and keys by their positions. Made once for a model, so that its layers share one table.

    Where the frequencies depend on the length of the context (dynamic, longrope), that length is ``max_model_len``
    for every request: an angle that followed a request's own growth would make keys in the cache wrong after the
    fact, and those of a prefix that two requests share different for each.
    """

    def __init__(self, ctx: BuildContext, config: RopeConfig, *, is_interleaved: bool = False) -> None:
        """``is_interleaved``: the checkpoint turns neighbouring dimensions as a pair. The projections' rows are put in
        another order when they are loaded (`QKVParallelLinear`), so that nothing here depends on it."""
        self._config = config
        self.interleaved_dim = config.rotary_dim if is_interleaved else 0
        self._num_positions = ctx.config.model.max_model_len
        self._num_rows = self._num_positions
        self._device = ctx.device
        self._rotary = ctx.ops.rotary
        self._table: torch.Tensor | None = None

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``q, k: [num_tokens, heads, head_dim]``, which may be overwritten; ``positions: [num_tokens]`` int64."""
        return self._rotary(q, k, positions, self.table())

    def table(self) -> torch.Tensor:
        """``[num_positions, rotary_dim]`` float32, cosines before sines; made when first asked for."""
        if self._table is None:
            self._table = self._make_table().to(self._device)
        return self._table

    def limit_positions(self, num_positions: int) -> None:
        """Positions from here on are never asked for: the KV cache holds no longer sequence than ``max_model_len``, and
        may hold a much shorter one. The frequencies stay those of the whole length."""
        self._num_rows = min(num_positions, self._num_positions)
        self._table = None

    def _make_table(self) -> torch.Tensor:
        frequencies, attention_factor = inverse_frequencies(self._config, self._num_positions)
        # Angles in float32 carry its rounding errors at large positions. Models were trained with just those.
        positions = torch.arange(self._num_rows, dtype=torch.float32)
        angles = torch.outer(positions, torch.from_numpy(frequencies).float())
        return torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
