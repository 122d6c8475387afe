"""Linear layers: a weight that may fuse several of the checkpoint's, a parallel style, and a kernel that multiplies.

The weight is there only between the first tensor loaded and `finish_loading`; then the kernel owns what it made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from inferplane.api.linear import LinearShape, Multiply
from inferplane.api.model import BuildContext
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.parallel import Share, even_share, kv_head_share, whole


class Linear(Layer):
    """``y = x @ weight.T + bias`` where the weight stacks the shares of one or more checkpoint matrices.

    ``outputs`` maps each matrix's name (``model.layers.0.mlp.gate_proj``; its tensors add ``.weight`` and ``.bias``)
    to the rows that this rank keeps; they lie in the fused weight in that order. ``inputs`` is the share of the
    columns. The bias is read from the checkpoint on every rank, but added only where ``adds_bias``.
    """

    def __init__(
        self,
        ctx: BuildContext,
        outputs: Mapping[str, Share],
        inputs: Share,
        *,
        bias: bool,
        adds_bias: bool = True,
    ) -> None:
        self._ctx = ctx
        self._outputs = outputs
        self._inputs = inputs
        self._has_bias = bias
        self._adds_bias = bias and adds_bias
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._multiply: Multiply = self._not_loaded

    @property
    def name(self) -> str:
        return "+".join(self._outputs)

    @property
    def in_features(self) -> int:
        return self._inputs.size

    @property
    def out_features(self) -> int:
        return sum(share.size for share in self._outputs.values())

    def weight_slots(self) -> Sequence[WeightSlot]:
        slots = []
        row = 0
        for name, share in self._outputs.items():
            rows = slice(row, row + share.size)
            shape = (share.total, self._inputs.total)
            slots.append(WeightSlot(f"{name}.weight", shape, partial(self._copy_weight, rows, share)))
            if self._has_bias:
                slots.append(
                    WeightSlot(f"{name}.bias", (share.total,), partial(self._copy_bias, rows, share))
                )
            row += share.size
        return slots

    def finish_loading(self) -> None:
        """Hands the weight to the best kernel and forgets it."""
        weight, bias = self._weight, self._bias
        assert weight is not None, self.name
        self._weight = self._bias = None
        shape = LinearShape(self.name, self.in_features, self.out_features, self._ctx.dtype, bias is not None)
        self._multiply = self._ctx.choose_linear(shape).prepare(weight, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features] -> [num_tokens, out_features]``"""
        return self._multiply(x)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._ctx.dtype, device=self._ctx.device)

    def _copy_weight(self, rows: slice, share: Share, tensor: torch.Tensor) -> None:
        # made on first use, so that a model whose kernels pack into less never holds all of its plain weights
        if self._weight is None:
            self._weight = self._empty(self.out_features, self.in_features)
        self._weight[rows].copy_(tensor[share.span, self._inputs.span])

    def _copy_bias(self, rows: slice, share: Share, tensor: torch.Tensor) -> None:
        if not self._adds_bias:
            return
        if self._bias is None:
            self._bias = self._empty(self.out_features)
        self._bias[rows].copy_(tensor[share.span])

    def _not_loaded(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"{self.name} was called before its weights were loaded")


class ReplicatedLinear(Linear):
    """The whole product on every rank."""

    def __init__(
        self, ctx: BuildContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        super().__init__(ctx, {prefix: whole(out_features)}, whole(in_features), bias=bias)


class MergedColumnParallelLinear(Linear):
    """Several matrices of the same input in one product, each split by output features: rank r has part r of each.

    ``out_features`` maps the names below ``prefix``, as in ``{"gate_proj": 1536, "up_proj": 1536}``.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        in_features: int,
        out_features: Mapping[str, int],
        *,
        bias: bool = False,
    ) -> None:
        outputs = {}
        for part, size in out_features.items():
            name = f"{prefix}.{part}"
            outputs[name] = even_share(size, ctx.comm, f"{name}: out_features")
        super().__init__(ctx, outputs, whole(in_features), bias=bias)


class ColumnParallelLinear(Linear):
    """Split by output features: every rank sees the whole input and makes a part of the output."""

    def __init__(
        self, ctx: BuildContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        outputs = {prefix: even_share(out_features, ctx.comm, f"{prefix}: out_features")}
        super().__init__(ctx, outputs, whole(in_features), bias=bias)


class QKVParallelLinear(Linear):
    """``q_proj``, ``k_proj`` and ``v_proj`` below ``prefix`` in one product, split by heads.

    The output is ``[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`` with the attributes ``num_heads`` and
    ``num_kv_heads``, which count this rank's. With fewer KV heads than ranks each is kept by several.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        in_features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool = False,
    ) -> None:
        heads = even_share(num_heads, ctx.comm, f"{prefix}: number of attention heads")
        kv_heads = kv_head_share(num_kv_heads, ctx.comm, f"{prefix}: number of KV heads")
        outputs = {
            f"{prefix}.q_proj": heads.scaled(head_dim),
            f"{prefix}.k_proj": kv_heads.scaled(head_dim),
            f"{prefix}.v_proj": kv_heads.scaled(head_dim),
        }
        super().__init__(ctx, outputs, whole(in_features), bias=bias)
        self.num_heads = heads.size
        self.num_kv_heads = kv_heads.size


class RowParallelLinear(Linear):
    """Split by input features: every rank multiplies its part, and the sum over ranks is the output on all."""

    def __init__(
        self, ctx: BuildContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        inputs = even_share(in_features, ctx.comm, f"{prefix}: in_features")
        # one rank adds the bias, or the sum would have it once for each
        adds_bias = ctx.comm.rank == 0
        super().__init__(ctx, {prefix: whole(out_features)}, inputs, bias=bias, adds_bias=adds_bias)
        self._all_reduce = ctx.comm.all_reduce

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features of this rank] -> [num_tokens, out_features]``"""
        return self._all_reduce(self._multiply(x))
