"""Rounding a matrix column by column, where what a column loses is made up for by those that come after it.

GPTQ (arXiv:2210.17323): the errors that count are those of the products with typical inputs x, which the sum of x·xᵀ
over some of them tells.
"""

from __future__ import annotations

import torch

from inferplane.api.quantized_weight import QuantizedWeight, QuantScheme
from inferplane.quantization.rounding import codes_of
from inferplane.quantization.scale_search import nearest, search_scales

DAMPING = 0.01
"""Part of the mean that is added to the diagonal: a few inputs say nothing of most directions."""
COLUMNS = 128
"""Columns that are rounded before the rest of the matrix is told."""


def round_with_feedback(weight: torch.Tensor, scheme: QuantScheme, moments: torch.Tensor) -> QuantizedWeight:
    """``weight: [out_features, in_features]`` and ``moments: [in_features, in_features]``, the sum of x·xᵀ; a symmetric
    scheme of integers or FP4 with a scale for each row and group, whose groups divide in_features."""
    size = scheme.granularity.columns
    assert size is not None and weight.shape[1] % size == 0, scheme
    left, inverse = weight.float().clone(), _inverse_root(moments.double())
    rounded, scales = torch.empty_like(left), []
    # how much of a column's error the later ones cannot take over
    importance = inverse.diagonal().reciprocal().square().view(-1, size)
    for start in range(0, left.shape[1], COLUMNS):
        end = min(start + COLUMNS, left.shape[1])
        errors = torch.zeros_like(left[:, start:end])
        for column in range(start, end):
            if column % size == 0:
                # of a group that begins here, later columns of the block have heard of the earlier ones already
                block = left[:, column : column + size].unsqueeze(1)
                scales.append(search_scales(block, scheme, importance[column // size].unsqueeze(0)))
            scale = scales[-1].float().squeeze(1)
            scaled = nearest(left[:, column] / scale, scheme)
            rounded[:, column] = scaled
            error = (left[:, column] - scaled * scale) / inverse[column, column]
            left[:, column + 1 : end] -= torch.outer(error, inverse[column, column + 1 : end])
            errors[:, column - start] = error
        left[:, end:] -= errors @ inverse[start:end, end:]
    return QuantizedWeight(scheme, len(left), left.shape[1], codes_of(rounded, scheme), torch.cat(scales, 1))


def _inverse_root(moments: torch.Tensor) -> torch.Tensor:
    """Upper triangular U with UᵀU the inverse of the moments, float32."""
    diagonal = moments.diagonal()
    damped = moments + torch.eye(len(moments), dtype=moments.dtype, device=moments.device) * (
        DAMPING * diagonal.mean().clamp(min=1e-12)
    )
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True).float()
