"""Against every scale of a fine grid, and every code of each number."""

from __future__ import annotations

import pytest
import torch

from inferplane.api.quantized_weight import TABLES, Number, QuantScheme
from inferplane.quantization.rounding import INT4_GROUPS, MXFP4, codes_of, round_to, with_columns
from inferplane.quantization.scale_search import nearest, search_scales

SCHEMES = {"int4": with_columns(INT4_GROUPS, 32), "mxfp4": MXFP4}


def numbers(scheme: QuantScheme) -> torch.Tensor:
    """All that codes stand for."""
    return torch.arange(-8.0, 8.0) if scheme.number is Number.INT else torch.tensor(TABLES[Number.FP4])


def least_error(block: torch.Tensor, scale: torch.Tensor, scheme: QuantScheme) -> torch.Tensor:
    """``block: [size]`` and ``scale: [n]`` to the sum of squared errors of each scale."""
    all_numbers = scale.view(-1, 1, 1) * numbers(scheme)
    return (all_numbers - block.view(1, -1, 1)).abs().amin(-1).square().sum(-1)


@pytest.mark.parametrize("name", SCHEMES)
def test_no_other_scale_errs_much_less(name: str) -> None:
    scheme = SCHEMES[name]
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[0, 3], weight[1] = 0.5, 0.0
    rounded = round_to(weight, scheme)
    errors = (rounded.dequantize(torch.float32) - weight).square().unflatten(1, (-1, 32)).sum(-1)
    powers = torch.exp2(torch.arange(-20.0, 4.0))
    for row, group in torch.cartesian_prod(torch.arange(6), torch.arange(3)).tolist():
        block = weight[row, 32 * group : 32 * group + 32]
        grid = powers if scheme is MXFP4 else block.abs().max() * torch.linspace(0.05, 0.2, 2000)
        best = least_error(block, grid, scheme).min()
        assert errors[row, group] <= best * (1 + 1e-4 if scheme is MXFP4 else 1.1) + 1e-12


@pytest.mark.parametrize("name", SCHEMES)
def test_the_codes_are_the_nearest(name: str) -> None:
    scheme = SCHEMES[name]
    scaled = torch.linspace(-9, 9, 1801).view(1, -1)
    found, table = nearest(scaled, scheme), numbers(scheme)
    assert torch.allclose((found - scaled).abs(), (scaled.unsqueeze(-1) - table).abs().amin(-1))
    codes = codes_of(scaled, scheme)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten()[:1801].long()
    assert torch.equal(table[nibbles], found[0])


def test_what_matters_more_errs_less() -> None:
    blocks = torch.randn(50, 1, 32, generator=torch.Generator().manual_seed(0))
    importance = torch.ones(1, 32)
    importance[0, :4] = 1000.0

    def error_of_few(scale: torch.Tensor) -> torch.Tensor:
        spread = scale.float().unsqueeze(-1)
        return (nearest(blocks / spread, INT4_GROUPS) * spread - blocks)[..., :4].square().sum()

    plain, weighted = search_scales(blocks, INT4_GROUPS), search_scales(blocks, INT4_GROUPS, importance)
    assert error_of_few(weighted) < 0.5 * error_of_few(plain)
