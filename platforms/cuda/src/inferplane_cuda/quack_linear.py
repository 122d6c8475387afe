"""Plain weights whose products of many rows are quack's, where that was measured to beat torch's library."""

from __future__ import annotations

import torch

from inferplane.api.device import DeviceDescriptor
from inferplane.api.linear import LinearShape, Multiply
from inferplane_cuda import quack_library
from inferplane_cuda.launch import LAUNCH
from inferplane_cuda.linear import CudaLinear
from inferplane_cuda.quack_library import ALIGNED, CAPABILITY, Tiles
from inferplane_torch_accelerator.dense_multiply import DenseMultiply
from inferplane_torch_accelerator.products import rounded_up

DTYPES = (torch.bfloat16, torch.float16)
ROWS = tuple(2**power for power in range(7, 14))
"""For which a choice of tiles is kept; other numbers of rows have that of the next one, and more that of the last."""


class QuackLinear(CudaLinear):
    """On GPUs with warpgroup products, in half precision, without bias. A gate's activation is done to the product
    before it is stored.

    Packages that are there and cannot be imported are found out about when a worker runs its largest step; then
    torch's library takes their place, and the log says why.
    """

    name = "cuda_quack"
    priority = 20

    @classmethod
    def unsupported_reason(cls, shape: LinearShape, device: DeviceDescriptor) -> str | None:
        if shape.dtype not in DTYPES:
            return f"quack multiplies bfloat16 and float16 here, not {shape.dtype}"
        if not device.capabilities.has(CAPABILITY):
            return f"{device.name} lacks {CAPABILITY}, which quack's tiles here are for"
        if shape.has_bias:
            return "a bias is left to torch's library"
        if shape.in_features % ALIGNED or shape.out_features % (2 * ALIGNED):
            return (
                f"quack's bulk copies need multiples of {ALIGNED} input and {2 * ALIGNED} output features, "
                f"not {shape.in_features} and {shape.out_features}"
            )
        if (package := quack_library.missing_package()) is not None:
            return f"the package {package} is not installed"
        return super().unsupported_reason(shape, device)

    @classmethod
    def prepare(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Multiply:
        return QuackMultiply(weight, bias)


class QuackMultiply(DenseMultiply):
    """A plain weight. What no table lists goes where a `DenseMultiply` sends it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, LAUNCH)
        self._tiles = [tiles_by_rows(weight, is_gated=gated) for gated in (False, True)]
        for is_gated, by_rows in enumerate(self._tiles):
            for tiles in by_rows.values():
                quack_library.start_compiling(weight, tiles, is_gated=bool(is_gated))

    def added_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        return super().added_to(residual, x) if self._tiles_for(x, is_gated=False) is None else None

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        y = self._by_quack(x, is_gated=False)
        return super()._by_library(x) if y is None else y

    def _more_rows_gated(self, x: torch.Tensor) -> torch.Tensor:
        y = self._by_quack(x, is_gated=True)
        return super()._more_rows_gated(x) if y is None else y

    def _by_quack(self, x: torch.Tensor, *, is_gated: bool) -> torch.Tensor | None:
        """None where it was not measured to be faster, or cannot be imported."""
        tiles = self._tiles_for(x, is_gated=is_gated)
        return None if tiles is None else quack_library.product(x, self._weight, tiles, is_gated=is_gated)

    def _tiles_for(self, x: torch.Tensor, *, is_gated: bool) -> Tiles | None:
        tiles = self._tiles[is_gated].get(min(rounded_up(x.shape[0]), ROWS[-1]))
        if tiles is None or x.stride(0) % ALIGNED or x.data_ptr() % (ALIGNED * x.element_size()):
            return None
        return tiles


def tiles_by_rows(weight: torch.Tensor, *, is_gated: bool) -> dict[int, Tiles]:
    """By the number of rows, rounded up to a power of two, where quack was measured to beat torch's library."""
    kernel = "quack_gated" if is_gated else "quack"
    found = {rows: LAUNCH.measured(kernel, (rows, *weight.shape), Tiles(), weight) for rows in ROWS}
    return {rows: tiles for rows, tiles in found.items() if tiles is not None}
