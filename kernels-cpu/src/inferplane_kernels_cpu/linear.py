"""Products with a constant weight.

Microseconds a call, 2 cores of an AVX2 machine, weights read from memory:

==========================  =====  ==============  ============
weight                      rows   `F.linear`      `PackedLinear`
==========================  =====  ==============  ============
3072 × 576, float32             1             708           539
3072 × 576, float32             8           1,711           691
3072 × 576, float32            64           3,685         2,373
3072 × 576, float32           512          17,058        13,390
49152 × 576, float32            1          14,584         6,724
49152 × 576, float32           64          79,352        33,156
==========================  =====  ==============  ============
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn.functional import linear

FEW_ROWS = 4
"""Up to this many rows reading the weight takes the time, so that half the bytes win over faster arithmetic."""

TILE_BYTES = 2 << 20
"""Of weight in float32 at a time: stays in cache between being converted and being multiplied."""


class PackedLinear:
    """The weight in the blocked layout of torch's oneDNN, packed once. Supports what `can_pack` says."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features] -> [num_tokens, out_features]``"""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class WidenedLinear:
    """A half-precision weight on a machine that multiplies only float32 well.

    Few rows are multiplied in half precision: reading the weight is what takes the time. For more the weight is
    widened to float32 tile by tile and never kept, so that it costs its own two bytes an element and no more.

    Microseconds a call for a bfloat16 weight of 3072 × 576: `F.linear` 913 (4 rows), 1,862 (8), 18,793 (64) and
    64,929 (256); widened about 1,000, 1,267, 2,749 and 8,461.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight.detach().contiguous()
        self._bias = bias
        out_features, in_features = weight.shape
        self._tile_rows = min(out_features, max(1, TILE_BYTES // (4 * in_features)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """``[num_tokens, in_features] -> [num_tokens, out_features]`` in x's dtype."""
        if x.shape[0] <= FEW_ROWS:
            return linear(x, self._weight, self._bias)
        wide, out_features = x.float(), self._weight.shape[0]
        out = x.new_empty(x.shape[0], out_features)
        tile = torch.empty(self._tile_rows, x.shape[1])
        for first in range(0, out_features, self._tile_rows):
            rows = slice(first, min(first + self._tile_rows, out_features))
            part = tile[: rows.stop - first].copy_(self._weight[rows])
            bias = None if self._bias is None else self._bias[rows].float()
            out[:, rows] = linear(wide, part, bias)
        return out


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build of torch on this machine packs and multiplies weights of ``dtype``. Found out by trying."""
    try:
        weight = torch.eye(16).to(dtype)
        return bool(torch.equal(PackedLinear(weight, None)(weight), weight))
    except (RuntimeError, AttributeError):
        return False
