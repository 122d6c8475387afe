"""Linear layers: a weight that may fuse several of the checkpoint's, a parallel style, and a kernel that multiplies.

The weight is there only between the first tensor loaded and `finish_loading`; then the kernel owns what it made of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from inferplane.api.linear import FusedMultiply, LinearShape, Multiply
from inferplane.api.model import BuildContext
from inferplane.api.quantized_weight import QuantizedWeight
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.norm import Norm, RMSNorm
from inferplane.layers.parallel import Rows, Share, even_share, stacked_rows, whole
from inferplane.layers.stored import stored_matrices


class Linear(Layer):
    """``y = x @ weight.T + bias`` where the weight stacks the shares of one or more checkpoint matrices.

    ``outputs`` maps each matrix's name (``model.layers.0.mlp.gate_proj``; its tensors add ``.weight`` and ``.bias``)
    to the rows that this rank keeps; they lie in the fused weight in that order. ``inputs`` is the share of the
    columns. The bias is read from the checkpoint on every rank, but added only where ``adds_bias``. With
    ``is_transposed`` the checkpoint has ``[in_features, out_features]``.
    """

    def __init__(
        self,
        ctx: BuildContext,
        outputs: Mapping[str, Share | Rows],
        inputs: Share,
        *,
        bias: bool,
        adds_bias: bool = True,
        is_transposed: bool = False,
    ) -> None:
        self._ctx = ctx
        self._outputs = outputs
        self._inputs = inputs
        self._has_bias = bias
        self._adds_bias = bias and adds_bias
        self._is_transposed = is_transposed
        self._stored = stored_matrices(ctx, outputs, inputs)
        self._weight: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._multiply: Multiply = self._not_loaded
        self.fused: FusedMultiply | None = None
        """The multiplication, where it can take norm or activation along; known once the weight is loaded."""

    @property
    def name(self) -> str:
        return "+".join(self._outputs)

    @property
    def outputs(self) -> Mapping[str, Share | Rows]:
        """The rows of each matrix that the product has, in its order."""
        return self._outputs

    @property
    def in_features(self) -> int:
        return self._inputs.size

    @property
    def out_features(self) -> int:
        return sum(share.size for share in self._outputs.values())

    def weight_slots(self) -> Sequence[WeightSlot]:
        slots = [] if self._stored is None else [*self._stored.slots(is_transposed=self._is_transposed)]
        row = 0
        for name, share in self._outputs.items():
            rows = slice(row, row + share.size)
            if self._stored is None:
                shape = (share.total, self._inputs.total)
                if self._is_transposed:
                    shape = shape[::-1]
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
        self._weight = self._bias = None
        shape = LinearShape(self.name, self.in_features, self.out_features, self._ctx.dtype, bias is not None)
        if self._stored is not None:
            self._multiply = quantized_product(self._ctx, shape, self._stored.join(), bias)
        else:
            assert weight is not None, self.name
            self._multiply = self._ctx.choose_linear(shape).prepare(weight, bias)
        if isinstance(self._multiply, FusedMultiply):
            self.fused = self._multiply

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features] -> [num_tokens, out_features]``"""
        return self._multiply(x)

    def after_norm(
        self, norm: Norm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The product of ``norm(x + residual)``, and that sum; in one step where kernel and norm allow it."""
        if self.fused is not None and isinstance(norm, RMSNorm):
            return self.fused.after_add_rms_norm(x, residual, norm.weight, norm.eps, is_gated=False)
        x, residual = norm.add(x, residual)
        return self(x), residual

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._ctx.dtype, device=self._ctx.device)

    def _copy_weight(self, rows: slice, share: Share | Rows, tensor: torch.Tensor) -> None:
        # made on first use, so that a model whose kernels pack into less never holds all of its plain weights
        if self._weight is None:
            self._weight = self._empty(self.out_features, self.in_features)
        matrix = tensor.T if self._is_transposed else tensor
        self._weight[rows].copy_(matrix[share.span, self._inputs.span])

    def _copy_bias(self, rows: slice, share: Share | Rows, tensor: torch.Tensor) -> None:
        if not self._adds_bias:
            return
        if self._bias is None:
            self._bias = self._empty(self.out_features)
        self._bias[rows].copy_(tensor[share.span])

    def _not_loaded(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(f"{self.name} was called before its weights were loaded")


def quantized_product(
    ctx: BuildContext, shape: LinearShape, weights: Sequence[QuantizedWeight], bias: torch.Tensor | None
) -> Multiply:
    """By kernels that take the weights, which lie one below another, as they are or, where there are none, by the best
    for their dequantized form."""
    row, products = 0, []
    shapes = [replace(shape, out_features=each.out_features, scheme=each.scheme) for each in weights]
    kernels = [ctx.choose_quantized(each) for each in shapes]
    if not any(kernels):
        plain = torch.cat([each.dequantize(shape.dtype) for each in weights])
        return ctx.choose_linear(shape).prepare(plain, bias)
    for weight, kernel in zip(weights, kernels):
        rows = slice(row, row + weight.out_features)
        part = None if bias is None else bias[rows]
        if kernel is not None:
            products.append(kernel.prepare(weight, part))
        else:
            plain_shape = replace(shape, out_features=weight.out_features)
            products.append(ctx.choose_linear(plain_shape).prepare(weight.dequantize(shape.dtype), part))
        row = rows.stop
    return products[0] if len(products) == 1 else StackedProduct(products)


class StackedProduct:
    """Of matrices that lie one below another and are quantized differently."""

    def __init__(self, products: Sequence[Multiply]) -> None:
        self._products = products

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([multiply(x) for multiply in self._products], -1)


class ReplicatedLinear(Linear):
    """The whole product on every rank."""

    def __init__(
        self, ctx: BuildContext, prefix: str, in_features: int, out_features: int, *, bias: bool = False
    ) -> None:
        super().__init__(ctx, {prefix: whole(out_features)}, whole(in_features), bias=bias)


class MergedColumnParallelLinear(Linear):
    """Several matrices of the same input in one product, each split by output features: rank r has part r of each.

    ``out_features`` maps the names below ``prefix``, as in ``{"gate_proj": 1536, "up_proj": 1536}``. With
    ``fused_name`` the checkpoint has them one below another in one matrix of that name.
    """

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        in_features: int,
        out_features: Mapping[str, int],
        *,
        bias: bool = False,
        fused_name: str | None = None,
    ) -> None:
        shares = {
            f"{prefix}.{part}": even_share(size, ctx.comm, f"{prefix}.{part}: out_features")
            for part, size in out_features.items()
        }
        outputs: Mapping[str, Share | Rows] = shares
        if fused_name is not None:
            outputs = {f"{prefix}.{fused_name}": stacked_rows(shares.values())}
        super().__init__(ctx, outputs, whole(in_features), bias=bias)


class ColumnParallelLinear(Linear):
    """Split by output features: every rank sees the whole input and makes a part of the output."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        is_transposed: bool = False,
    ) -> None:
        outputs = {prefix: even_share(out_features, ctx.comm, f"{prefix}: out_features")}
        super().__init__(ctx, outputs, whole(in_features), bias=bias, is_transposed=is_transposed)


class RowParallelLinear(Linear):
    """Split by input features: every rank multiplies its part, and the sum over ranks is the output on all."""

    def __init__(
        self,
        ctx: BuildContext,
        prefix: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        is_transposed: bool = False,
    ) -> None:
        inputs = even_share(in_features, ctx.comm, f"{prefix}: in_features")
        # one rank adds the bias, or the sum would have it once for each
        adds_bias = ctx.comm.rank == 0
        super().__init__(
            ctx,
            {prefix: whole(out_features)},
            inputs,
            bias=bias,
            adds_bias=adds_bias,
            is_transposed=is_transposed,
        )
        self._all_reduce = ctx.comm.all_reduce
        self._is_whole = ctx.comm.world_size == 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features of this rank] -> [num_tokens, out_features]``"""
        return self._all_reduce(self._multiply(x))

    def beside(self, residual: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The product of x, and ``residual`` for the next norm to add; or their sum and None, where that costs less."""
        if self.fused is not None and self._is_whole:
            total = self.fused.added_to(residual, x)
            if total is not None:
                return total, None
        return self(x), residual
