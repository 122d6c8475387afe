"""Products by a weight of 4-bit codes: few rows from the codes, many through the weight written out for a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch.nn.functional import linear

from inferplane.api.quant import QuantizedWeight
from inferplane_kernels_triton.int4_dequantize import DequantizeConfig, dequantize_int4
from inferplane_kernels_triton.int4_fixed_matvec import Int4FixedMatvecConfig, int4_fixed_matvec
from inferplane_kernels_triton.int4_matmul import Int4MatmulConfig, int4_matmul
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.int4_matvec import Int4MatvecConfig, int4_matvec
from inferplane_kernels_triton.matvec import NormBefore
from inferplane_kernels_triton.skinny_matmul import MAX_TOKENS, MatmulWorkspace, padded_tokens
from inferplane_torch_accelerator.fused_product import FusedProduct
from inferplane_torch_accelerator.int4_linear import int4_matrix
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.products import shared_workspace

_WIDTHS = (16, 32, 64)
"""To which numbers of rows are rounded up."""


class Int4Multiply(FusedProduct):
    """``weight`` has scales by row and group, and columns in the groups' order."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, launch: Launch) -> None:
        super().__init__(bias, pdl=launch.pdl(weight.codes.device))
        self._matrix = int4_matrix(weight)
        shape, words = (weight.out_features, weight.in_features), self._matrix.words
        self._space = space_for(weight.out_features * weight.in_features, words.device)
        self._matvec: Callable[..., torch.Tensor]
        default: Int4FixedMatvecConfig | Int4MatvecConfig
        if launch.backend == "nvidia" and not self._matrix.is_e2m1:
            # four products of bytes an instruction, which other compilers than NVIDIA's have no word for
            self._matvec, name, default = int4_fixed_matvec, "int4_fixed_matvec", Int4FixedMatvecConfig()
        else:
            self._matvec, name, default = int4_matvec, "int4_matvec", Int4MatvecConfig()
        self._for_one_row = [
            launch.config(kernel, shape, default, words) for kernel in (name, f"{name}_gated")
        ]
        self._for_few_rows = [
            {width: few_rows(kernel, self._matrix, width, launch) for width in _WIDTHS}
            for kernel in ("int4_matmul", "int4_matmul_gated")
        ]
        self._for_writing = launch.config("int4_dequantize", shape, DequantizeConfig(), words)

    def _one_row(
        self, x: torch.Tensor, norm: NormBefore | None = None, is_gated: bool = False
    ) -> torch.Tensor:
        return self._matvec(
            x,
            self._matrix,
            norm=norm,
            bias=self._bias,
            gated=is_gated,
            config=self._for_one_row[is_gated],
            pdl=self._pdl,
        )

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        return self._few_rows(x, is_gated=False) if len(x) <= MAX_TOKENS else self._by_library(x)

    def _more_rows_gated(self, x: torch.Tensor) -> torch.Tensor:
        return self._few_rows(x, is_gated=True) if len(x) <= MAX_TOKENS else super()._more_rows_gated(x)

    def _few_rows(self, x: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
        choice = self._for_few_rows[is_gated][padded_tokens(len(x))]
        return int4_matmul(
            x,
            self._matrix,
            bias=self._bias,
            gated=is_gated,
            workspace=choice.workspace,
            config=choice.config,
            pdl=self._pdl,
        )

    def _by_library(self, x: torch.Tensor) -> torch.Tensor:
        """Of 8,192 rows the detour costs the product three percent, and it runs at the library's speed."""
        shape = (self._matrix.out_features, self._matrix.in_features)
        weight = self._space[: shape[0] * shape[1]].view(x.dtype).view(shape)
        dequantize_int4(self._matrix, weight, config=self._for_writing, pdl=self._pdl)
        return linear(x, weight, self._bias)


@dataclass(frozen=True)
class Int4FewRowsChoice:
    config: Int4MatmulConfig
    workspace: MatmulWorkspace | None


def few_rows(kernel: str, matrix: Int4Matrix, width: int, launch: Launch) -> Int4FewRowsChoice:
    """How up to ``width`` rows are multiplied."""
    out_features = matrix.out_features
    default = Int4MatmulConfig.default(width, out_features)
    config = launch.config(kernel, (width, out_features, matrix.in_features), default, matrix.words)
    space = shared_workspace(matrix.words.device, out_features, config.splits) if config.splits > 1 else None
    return Int4FewRowsChoice(config, space)


_spaces: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()
"""Held by the products alone, so that their memory goes with the last one."""


def space_for(num_weights: int, device: torch.device) -> torch.Tensor:
    """16-bit memory for at least so many weights. Products run one after another, in graphs as well, so that each
    writes over what the one before it wrote; one that asks for more than there is gets more, and earlier ones keep
    theirs."""
    space = _spaces.get(device)
    if space is None or space.numel() < num_weights:
        space = _spaces[device] = torch.empty(num_weights, dtype=torch.int16, device=device)
    return space
