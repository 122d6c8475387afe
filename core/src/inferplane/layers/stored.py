"""The quantized matrices of a linear layer, from the checkpoint's tensors to this rank's part in one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby

import torch

from inferplane.api.model import BuildContext
from inferplane.api.quant import StoredMatrix
from inferplane.api.quantized_weight import QuantizedWeight, stack
from inferplane.layers.layer import WeightSlot
from inferplane.layers.parallel import Rows, Share
from inferplane.models.errors import ModelLoadError


def stored_matrices(
    ctx: BuildContext, outputs: Mapping[str, Share | Rows], inputs: Share
) -> StoredMatrices | None:
    """What the checkpoint's format says of a layer's matrices; None where they are plain.

    Raises `ModelLoadError` where one product would have some of both, or a matrix does not fit its format.
    """
    if ctx.quantization is None:
        return None
    asked = {name: stored_matrix(ctx, name, share.total, inputs.total) for name, share in outputs.items()}
    found = {name: matrix for name, matrix in asked.items() if matrix is not None}
    if not found:
        return None
    if plain := [name for name in outputs if name not in found]:
        raise ModelLoadError(
            f"{', '.join(found)} and {', '.join(plain)} are one product, but only the first is quantized"
        )
    return StoredMatrices(ctx, found, outputs, inputs)


def stored_matrix(ctx: BuildContext, name: str, out_features: int, in_features: int) -> StoredMatrix | None:
    """None where it is plain. Raises `ModelLoadError` where it does not fit its format."""
    if ctx.quantization is None:
        return None
    try:
        return ctx.quantization.matrix(name, out_features, in_features)
    except ValueError as error:
        raise ModelLoadError(f"{name} [{out_features}, {in_features}]: {error}") from error


def stored_vocabulary(ctx: BuildContext, name: str, vocab_size: int, size: int) -> StoredMatrix | None:
    """As `stored_matrix`, of an embedding or an output head."""
    if ctx.quantization is None:
        return None
    try:
        return ctx.quantization.vocabulary(name, vocab_size, size)
    except ValueError as error:
        raise ModelLoadError(f"{name} [{vocab_size}, {size}]: {error}") from error


def stored_experts(
    ctx: BuildContext, name: str, num_experts: int, out_features: int, in_features: int
) -> StoredMatrix | None:
    """As `stored_matrix`, of the experts' matrices in one tensor."""
    if ctx.quantization is None:
        return None
    try:
        return ctx.quantization.stacked(name, num_experts, out_features, in_features)
    except ValueError as error:
        raise ModelLoadError(f"{name}: {error}") from error


def _read(matrix: StoredMatrix, tensors: Mapping[str, torch.Tensor], device: torch.device) -> QuantizedWeight:
    """The whole matrix on the device. Raises `QuantConfigError`."""
    weight = matrix.read({key: tensor.to(device) for key, tensor in tensors.items()})
    scale = weight.scale
    # kernels take every code of this type for a power of two; the last is none
    if scale.dtype is torch.float8_e8m0fnu and not scale.is_meta and (scale.view(torch.uint8) == 255).any():
        raise matrix.fail("a scale in e8m0 is 255, which stands for no number")
    return weight


class KeptMatrix:
    """One stored matrix, whose tensors are kept as they come, which is free while they are parts of a mapped file."""

    def __init__(self, ctx: BuildContext, matrix: StoredMatrix, separator: str = ".") -> None:
        self._ctx = ctx
        self._matrix = matrix
        self._separator = separator
        self._tensors: dict[str, torch.Tensor] = {}

    def slots(self) -> Sequence[WeightSlot]:
        return [
            WeightSlot(
                self._matrix.name + self._separator + stored.suffix,
                stored.shape,
                partial(self._keep, stored.suffix),
                stored.is_required,
                stored.dtypes,
            )
            for stored in self._matrix.tensors()
        ]

    def read(self) -> QuantizedWeight:
        """The whole matrix on the device, without the optional tensors that have not come.

        Raises `ModelLoadError` naming the matrix.
        """
        try:
            return _read(self._matrix, self._tensors, self._ctx.device)
        except ValueError as error:
            raise ModelLoadError(str(error)) from error

    def _keep(self, suffix: str, tensor: torch.Tensor) -> None:
        self._tensors[suffix] = tensor


class WeightFilling(KeptMatrix):
    """One stored matrix, which is handed on as soon as its tensors are there."""

    def __init__(
        self, ctx: BuildContext, matrix: StoredMatrix, use: Callable[[QuantizedWeight], None]
    ) -> None:
        super().__init__(ctx, matrix)
        self._use = use
        self._suffixes = {stored.suffix for stored in matrix.tensors()}

    def finish(self) -> None:
        """Does without the optional tensors that have not come. Raises `ModelLoadError` naming the matrix."""
        if self._tensors:
            self._use(self.read())
            self._tensors = {}

    def _keep(self, suffix: str, tensor: torch.Tensor) -> None:
        super()._keep(suffix, tensor)
        if self._tensors.keys() == self._suffixes:
            self.finish()


class MatrixFilling(WeightFilling):
    """As `WeightFilling`, with plain numbers."""

    def __init__(self, ctx: BuildContext, matrix: StoredMatrix, use: Callable[[torch.Tensor], None]) -> None:
        super().__init__(ctx, matrix, lambda weight: use(weight.dequantize(ctx.dtype)))


class StoredMatrices:
    """Keeps the tensors as they come, which is free while they are parts of a mapped file, until all are there."""

    def __init__(
        self,
        ctx: BuildContext,
        matrices: Mapping[str, StoredMatrix],
        outputs: Mapping[str, Share | Rows],
        inputs: Share,
    ) -> None:
        self._ctx = ctx
        self._matrices = matrices
        self._outputs = outputs
        self._inputs = inputs
        self._tensors: dict[str, dict[str, torch.Tensor]] = {name: {} for name in matrices}

    def slots(self, *, is_transposed: bool) -> Sequence[WeightSlot]:
        """``is_transposed`` is for a plain matrix that is quantized on the way: formats have an order of their own."""
        return [
            WeightSlot(
                f"{name}.{stored.suffix}",
                stored.shape[::-1]
                if (turned := is_transposed and stored.suffix == "weight")
                else stored.shape,
                partial(self._keep, name, stored.suffix, turned),
                stored.is_required,
                stored.dtypes,
            )
            for name, matrix in self._matrices.items()
            for stored in matrix.tensors()
        ]

    def _keep(self, name: str, suffix: str, is_transposed: bool, tensor: torch.Tensor) -> None:
        self._tensors[name][suffix] = tensor.T if is_transposed else tensor

    def join(self) -> list[QuantizedWeight]:
        """This rank's part of all, on the device, one below another; they are forgotten here.

        One weight, unless neighbours are quantized differently, be it by other tables. Raises `ModelLoadError` naming
        the layer.
        """
        tensors, self._tensors = self._tensors, {}
        try:
            weights = {name: self._read(name, tensors[name]) for name in tensors}
            runs = groupby(weights, lambda name: (weights[name].scheme, _numbers(weights[name].table)))
            return [
                stack([weights[name] for name in run], run) for run in map(list, (each for _, each in runs))
            ]
        except ValueError as error:
            raise ModelLoadError(str(error)) from error

    def _read(self, name: str, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        inputs = self._inputs
        weight = _read(self._matrices[name], tensors, self._ctx.device)
        try:
            weight = weight.columns(inputs.start, inputs.start + inputs.size)
        except ValueError as error:
            ranks = self._ctx.comm.world_size
            where = f"{name} [{self._outputs[name].total}, {inputs.total}] over {ranks} ranks"
            raise ModelLoadError(f"{where}: {error}") from error
        share = self._outputs[name]
        is_whole = isinstance(share, Share) and share.size == share.total
        return weight if is_whole else weight.rows(share.span)


def _numbers(table: torch.Tensor | None) -> tuple[float, ...] | None:
    """None of a table on the meta device, too, which has none."""
    return None if table is None or table.is_meta else tuple(table.tolist())
