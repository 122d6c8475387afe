"""A few rows times a 4-bit weight, split or not, with everything that can be fused into it, against float64."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.int4_matmul import Int4MatmulConfig, int4_matmul
from inferplane_kernels_triton.skinny_matmul import MatmulWorkspace
from int4_weights import drawn_int4
from kernel_checks import assert_close, gpu, poisoned

SMALL = Int4MatmulConfig(rows=16, num_stages=1)


def check(
    num_tokens: int,
    out_features: int,
    in_features: int,
    group: int | None,
    dtype: torch.dtype,
    device: torch.device,
    config: Int4MatmulConfig = SMALL,
    *,
    has_zero: bool = False,
    has_offset: bool = False,
    is_e2m1: bool = False,
    has_bias: bool = False,
    gated: bool = False,
    pdl: bool = False,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, in_features, device=device).to(dtype)
    weight, numbers = drawn_int4(
        out_features, in_features, group, device, has_zero=has_zero, has_offset=has_offset, is_e2m1=is_e2m1
    )
    bias = torch.randn(out_features, device=device).to(dtype) if has_bias else None
    out = poisoned(num_tokens, out_features // 2 if gated else out_features, dtype=dtype, device=device)
    workspace = MatmulWorkspace.allocate(num_tokens, out_features, config.splits, device)
    workspace.partial.fill_(float("nan"))
    for _ in range(2 if config.splits > 1 else 1):
        int4_matmul(x, weight, bias=bias, gated=gated, out=out, workspace=workspace, config=config, pdl=pdl)
    want = x.double() @ numbers.T
    if bias is not None:
        want = want + bias.double()
    if gated:
        gate, up = want.chunk(2, dim=-1)
        want = torch.nn.functional.silu(gate) * up
    assert_close(out, want)
    assert not workspace.arrived.any()


@pytest.mark.parametrize("group", [16, 32, 64, 128, 256, None])
def test_groups(group: int | None, device: torch.device):
    check(3, 20, 384, group, torch.float16, device)


@pytest.mark.parametrize(("in_features", "group"), [(96, 32), (200, 64), (130, 128), (7, None)])
def test_rows_that_end_within_a_block_or_a_group(in_features: int, group: int | None, device: torch.device):
    check(2, 16, in_features, group, torch.float16, device, has_zero=True)


@pytest.mark.parametrize(("in_features", "group"), [(256, 32), (96, 16), (200, 64)])
def test_e2m1(in_features: int, group: int, device: torch.device):
    check(3, 24, in_features, group, torch.float16, device, is_e2m1=True, gated=True, has_bias=True)


@pytest.mark.parametrize("num_tokens", [1, 17, 33, 64])
def test_numbers_of_rows(num_tokens: int, device: torch.device):
    check(num_tokens, 16, 128, 128, torch.float16, device)


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(
    "fused",
    [
        {"has_bias": True},
        {"gated": True},
        {"has_offset": True},
        {"gated": True, "has_bias": True, "has_zero": True, "has_offset": True},
    ],
    ids=lambda fused: "+".join(fused),
)
def test_fused(fused: dict, splits: int, device: torch.device):
    config = Int4MatmulConfig(rows=16, splits=splits, num_stages=1)
    check(3, 24, 512, 64, torch.float16, device, config, **fused)


def test_nothing_and_too_much(device: torch.device):
    weight, _ = drawn_int4(16, 128, 128, device)
    assert int4_matmul(torch.zeros(0, 128, device=device), weight, config=SMALL).shape == (0, 16)
    with pytest.raises(ValueError, match="x has 65 rows, needs at most 64"):
        int4_matmul(torch.zeros(65, 128, device=device), weight)


def test_small_weights_are_split():
    assert [Int4MatmulConfig.default(16, size).splits for size in (512, 4096, 6144, 28672)] == [8, 4, 2, 1]


@gpu
@pytest.mark.parametrize("pdl", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 32, 64])
def test_at_real_shapes(num_tokens: int, pdl: bool, device: torch.device):
    for shape, group in (((6144, 4096), 128), ((28672, 4096), 64), ((4096, 14336), 32)):
        config = Int4MatmulConfig.default(num_tokens, shape[0])
        for parts in ({}, {"has_zero": True}, {"has_offset": True, "has_bias": True, "gated": True}):
            check(num_tokens, *shape, group, torch.bfloat16, device, config, pdl=pdl, **parts)
