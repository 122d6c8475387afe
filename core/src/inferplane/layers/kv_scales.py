"""The scales of a layer's fp8 cache, from wherever a checkpoint keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from inferplane.api.kv_dtype import KVScales
from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.parallel import kv_head_share
from inferplane.models.errors import ModelLoadError

_PLACES = {
    "k": ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale"),
    "v": ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale"),
}
"""Below the attention's name, as compressed-tensors, ModelOpt, Quark and AutoFP8 write them."""


class LayerKVScales(Layer):
    """``scales`` is there from the start, 1 until a tensor comes. A checkpoint has one number for all heads or one for
    each."""

    def __init__(self, ctx: BuildContext, prefix: str, num_kv_heads: int) -> None:
        self.scales = KVScales.ones(num_kv_heads, ctx.device)
        self.prefix = prefix
        self.is_given = False
        """Whether the checkpoint had any."""
        self._comm = ctx.comm
        self._num_kv_heads = num_kv_heads

    def weight_slots(self) -> Sequence[WeightSlot]:
        targets: dict[str, list[torch.Tensor]] = {}
        for part, tensor in (("k", self.scales.k), ("v", self.scales.v)):
            for place in _PLACES[part]:
                targets.setdefault(f"{self.prefix}.{place}", []).append(tensor)
        return [
            WeightSlot(name, (None,), partial(self._copy, name, tensors), is_required=False)
            for name, tensors in targets.items()
        ]

    def _copy(self, name: str, targets: list[torch.Tensor], stored: torch.Tensor) -> None:
        values = stored.flatten().float()
        if not bool((values.isfinite() & (values > 0)).all()):
            raise ModelLoadError(f"{name}: a scale should be a number above 0, but is {values.tolist()}")
        if len(values) > 1:
            share = kv_head_share(len(values), self._comm, f"{name}: number of scales")
            if share.size != self._num_kv_heads:
                raise ModelLoadError(
                    f"{name}: has {len(values)} scales, but there should be one, or one for each KV head"
                )
            values = values[share.span]
        for target in targets:
            target.copy_(values)
        self.is_given = True
