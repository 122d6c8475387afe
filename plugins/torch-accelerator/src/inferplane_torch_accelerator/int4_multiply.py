"""Products by a weight of 4-bit codes: one row from the codes, more through the weight written out for a moment."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from inferplane.api.quant import QuantizedWeight
from inferplane_kernels_triton.int4_dequantize import DequantizeConfig, dequantize_int4
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.int4_matvec import Int4MatvecConfig, int4_matvec
from inferplane_kernels_triton.matvec import NormBefore
from inferplane_torch_accelerator.fused_product import FusedProduct
from inferplane_torch_accelerator.launch import Launch


class Int4Multiply(FusedProduct):
    """``weight`` has scales by row and group, and columns in the groups' order."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None, launch: Launch) -> None:
        super().__init__(bias, pdl=launch.pdl(weight.codes.device))
        self._matrix = Int4Matrix.pack(
            weight.codes,
            weight.scale,
            weight.in_features,
            weight.scheme.granularity.columns,
            weight.zero,
            weight.offset,
        )
        shape, words = (weight.out_features, weight.in_features), self._matrix.words
        self._space = space_for(weight.out_features * weight.in_features, words.device)
        self._for_one_row = [
            launch.config(kernel, shape, Int4MatvecConfig(), words)
            for kernel in ("int4_matvec", "int4_matvec_gated")
        ]
        self._for_writing = launch.config("int4_dequantize", shape, DequantizeConfig(), words)

    def _one_row(
        self, x: torch.Tensor, norm: NormBefore | None = None, is_gated: bool = False
    ) -> torch.Tensor:
        return int4_matvec(
            x,
            self._matrix,
            norm=norm,
            bias=self._bias,
            gated=is_gated,
            config=self._for_one_row[is_gated],
            pdl=self._pdl,
        )

    def _more_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Of 8,192 rows the detour costs a library's product three percent, and it multiplies at its full speed."""
        shape = (self._matrix.out_features, self._matrix.in_features)
        weight = self._space[: shape[0] * shape[1]].view(x.dtype).view(shape)
        dequantize_int4(self._matrix, weight, config=self._for_writing, pdl=self._pdl)
        return linear(x, weight, self._bias)


_spaces: dict[torch.device, torch.Tensor] = {}


def space_for(num_weights: int, device: torch.device) -> torch.Tensor:
    """16-bit memory for at least so many weights. Products run one after another, in graphs as well, so that each
    writes over what the one before it wrote; one that asks for more than there is gets more, and earlier ones keep
    theirs."""
    space = _spaces.get(device)
    if space is None or space.numel() < num_weights:
        space = _spaces[device] = torch.empty(num_weights, dtype=torch.int16, device=device)
    return space
