"""Routing and experts against float64, one pair of token and expert at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from coded_experts import DTYPES, drawn_experts
from inferplane_kernels_triton import moe_sort
from inferplane_kernels_triton.int4_matrix import Int4Matrix
from inferplane_kernels_triton.moe_codes import ExpertCodes
from inferplane_kernels_triton.moe_experts import ACTIVATIONS, ExpertsConfig, ExpertsWeight, fused_experts
from inferplane_kernels_triton.moe_one_token import OneTokenConfig
from inferplane_kernels_triton.moe_routing import topk_softmax
from inferplane_kernels_triton.moe_sort import sort_by_expert
from int4_weights import drawn_int4
from kernel_checks import MATRIX_DTYPES, SLOW_WHEN_INTERPRETED, assert_close, gpu

SMALL = ExpertsConfig(16, 16, 32, 4, 1)
ALPHA, LIMIT = 1.702, 1.0
Codes = Callable[[int, int, int, torch.device], tuple[ExpertCodes | Int4Matrix, torch.Tensor]]
"""Draws experts, out, in, on a device."""


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (5, 12, 3), (3, 4, 4)])
def test_topk_softmax(num_tokens: int, num_experts: int, top_k: int, renormalize: bool, device: torch.device):
    logits = torch.randn(num_tokens, num_experts, device=device)
    weights, ids = topk_softmax(logits, top_k, renormalize)
    want, want_ids = logits.double().softmax(-1).topk(top_k, dim=-1)
    assert torch.equal(ids.long(), want_ids)
    assert_close(weights, want / want.sum(-1, keepdim=True) if renormalize else want)


@pytest.mark.parametrize("max_compared", [2048, 0])
@pytest.mark.parametrize("first_expert", [0, 2])
def test_sort_by_expert(
    first_expert: int, max_compared: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(moe_sort, "MAX_COMPARED", max_compared)
    monkeypatch.setattr(moe_sort, "BLOCK", 8)
    monkeypatch.setattr(moe_sort, "BLOCKS_AT_ONCE", 2)
    ids = torch.randint(0, 7, (9, 3), dtype=torch.int32, device=device)
    order, starts = sort_by_expert(ids, 4, first_expert)
    assert sorted(order.tolist()) == list(range(27))
    assert starts[0] == 0
    for expert in range(4):
        mine = order[starts[expert] : starts[expert + 1]]
        assert mine.tolist() == (ids.flatten() == expert + first_expert).nonzero().flatten().tolist()


def gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    g, u = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return torch.nn.functional.silu(g) * u
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(g, approximate="tanh") * u
    g, u = g.clamp(max=LIMIT), u.clamp(-LIMIT, LIMIT)
    return g * torch.sigmoid(ALPHA * g) * (u + 1)


def check(
    num_tokens: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    config: ExpertsConfig | None,
    *,
    codes: Codes | None = None,
    activation: str = "silu",
    has_bias: bool = False,
    first_expert: int = 0,
    one_token: tuple[OneTokenConfig, OneTokenConfig] | None = None,
    down_config: ExpertsConfig | None = None,
) -> None:
    num_experts, top_k, hidden, inner = shape
    x = torch.randn(num_tokens, hidden + 8, device=device).to(dtype)[:, 8:]
    w13, w13_numbers = weights_of(num_experts, 2 * inner, hidden, dtype, device, codes)
    w2, w2_numbers = weights_of(num_experts, hidden, inner, dtype, device, codes)
    b13 = torch.randn(num_experts, 2 * inner, device=device).to(dtype) if has_bias else None
    b2 = torch.randn(num_experts, hidden, device=device).to(dtype) if has_bias else None
    weights, ids = topk_softmax(torch.randn(num_tokens, num_experts, device=device), top_k, True)
    ids = ids + (first_expert // 2)  # some are elsewhere when first_expert is not 0
    got = fused_experts(
        x, weights, ids, w13, w2, activation=activation, w13_bias=b13, w2_bias=b2, first_expert=first_expert,
        swiglu_alpha=ALPHA, swiglu_limit=LIMIT, config=config,
        one_token=one_token, down_config=down_config,
    )  # fmt: skip
    want = torch.zeros(num_tokens, hidden, dtype=torch.float64, device=device)
    local = ids - first_expert
    for e in range(num_experts):
        rows, places = (local == e).nonzero(as_tuple=True)
        hidden_states = x[rows].double() @ w13_numbers[e].T
        hidden_states = gate(hidden_states + (b13[e].double() if has_bias else 0), activation)
        y = hidden_states @ w2_numbers[e].T + (b2[e].double() if has_bias else 0)
        want.index_add_(0, rows, y * weights[rows, places].double()[:, None])
    assert_close(got, want)


def weights_of(
    num_experts: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    codes: Codes | None,
) -> tuple[ExpertsWeight, torch.Tensor]:
    """Plain or coded, and in float64."""
    if codes is not None:
        return codes(num_experts, out_features, in_features, device)
    numbers = torch.randn(num_experts, out_features, in_features, device=device) * in_features**-0.5
    return numbers.to(dtype), numbers.to(dtype).double()


@pytest.mark.parametrize("dtype", [torch.float32, *MATRIX_DTYPES], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_fused_experts(num_tokens: int, dtype: torch.dtype, device: torch.device):
    check(num_tokens, (4, 2, 40, 24), dtype, device, SMALL)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_biases(activation: str, device: torch.device):
    check(3, (4, 2, 32, 16), torch.float32, device, SMALL, activation=activation, has_bias=True)


def test_each_product_has_a_configuration_of_its_own(device: torch.device):
    check(20, (4, 2, 40, 24), torch.float32, device, SMALL, down_config=ExpertsConfig(32, 32, 16, 4, 1))


ONE_TOKEN = (OneTokenConfig(4, 16), OneTokenConfig(8, 32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(4, 2, 40, 24), (6, 3, 30, 18)], ids=str)
def test_a_single_token(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
    check(1, shape, dtype, device, None, one_token=ONE_TOKEN)


def test_a_program_takes_a_row_in_few_parts():
    config = OneTokenConfig(8, 256)
    assert config.tile(768, 8) == (8, 256)
    assert config.tile(100, 8) == (8, 128)
    assert config.tile(2048, 8) == (4, 512)
    assert config.tile(14336, 2) == (2, 1024)
    assert config.tile(64, 40) == (8, 64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("first_expert", [0, 4])
def test_a_single_token_in_every_way(first_expert: int, activation: str, device: torch.device):
    """On another rank only some of its experts are here, or none."""
    check(
        1, (4, 3, 32, 16), torch.float32, device, None, activation=activation, has_bias=True,
        first_expert=first_expert, one_token=ONE_TOKEN,
    )  # fmt: skip


def in_eight_bits(
    block: tuple[int | None, int | None], dtype: torch.dtype = torch.float8_e4m3fn
) -> dict[str, Codes]:
    return {"codes": lambda *sizes: drawn_experts(*sizes[:3], block, sizes[3], dtype)}


BLOCKS = [(1, None), (8, 32), (16, 16), (1, 48)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize(
    ("num_tokens", "dtype"),
    [
        pytest.param(1, torch.float32, marks=SLOW_WHEN_INTERPRETED),
        (20, torch.float32),
        (1, torch.float16),
        (20, torch.float16),
    ],
    ids=str,
)
def test_codes(num_tokens: int, block: tuple[int, int | None], dtype: torch.dtype, device: torch.device):
    """Rows that end within a block, and several blocks in a tile or the other way round."""
    check(num_tokens, (4, 2, 72, 40), dtype, device, SMALL, **in_eight_bits(block))


@pytest.mark.parametrize("coded_dtype", DTYPES, ids=str)
def test_types_of_codes(coded_dtype: torch.dtype, device: torch.device):
    for num_tokens, config in ((6, SMALL), (1, None)):
        codes = in_eight_bits((8, 32), coded_dtype)
        check(
            num_tokens,
            (4, 2, 40, 24),
            torch.float16,
            device,
            config,
            has_bias=True,
            one_token=ONE_TOKEN,
            **codes,
        )


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("first_expert", [pytest.param(0, marks=SLOW_WHEN_INTERPRETED), 4])
def test_codes_of_a_single_token(first_expert: int, block: tuple[int, int | None], device: torch.device):
    check(
        1, (4, 3, 72, 40), torch.float32, device, None, first_expert=first_expert, has_bias=True,
        one_token=ONE_TOKEN, **in_eight_bits(block),
    )  # fmt: skip


FOUR_BITS = {
    "int4": {"group": 32},
    "zero points and offsets": {"group": 16, "has_zero": True, "has_offset": True},
    "rows": {"group": None},
    "E2M1": {"group": 32, "is_e2m1": True},
}


def in_four_bits(**parts: Any) -> dict[str, Codes]:
    def draw(
        num_experts: int, out_features: int, in_features: int, device: torch.device
    ) -> tuple[Int4Matrix, torch.Tensor]:
        matrix, numbers = drawn_int4(num_experts * out_features, in_features, device=device, **parts)
        # as large as others' weights, so that no activation is past its limit
        factor = 0.125 if parts.get("is_e2m1") else 2.0 ** -round(math.log2(numbers.std() * in_features**0.5))
        if matrix.scale.dtype == torch.uint8:
            return replace(matrix, scale=matrix.scale - 3), (numbers * factor).unflatten(0, (num_experts, -1))
        offset = None if matrix.offset is None else matrix.offset * factor
        matrix = replace(matrix, scale=matrix.scale * factor, offset=offset)
        return matrix, (numbers * factor).unflatten(0, (num_experts, -1))

    return {"codes": draw}


@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize(("num_tokens", "activation"), [(1, "silu"), (9, "clamped_swiglu")])
def test_codes_of_four_bits(kind: str, num_tokens: int, activation: str, device: torch.device):
    """Rows that end within a block and a group, and a tile that ends within an expert's rows."""
    check(
        num_tokens, (4, 2, 72, 40), torch.float16, device, SMALL if num_tokens > 1 else None, activation=activation,
        has_bias=True, first_expert=2, **in_four_bits(**FOUR_BITS[kind]),
    )  # fmt: skip


def test_codes_whose_scales_do_not_fit(device: torch.device):
    codes = torch.zeros(2, 8, 40, dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match=r"scale has shape \(2, 8, 1\), needs \(2, 1, 1\)"):
        ExpertCodes(codes, torch.zeros(2, 8, 1, device=device), 8, 40)
    with pytest.raises(ValueError, match="a multiple of 16 columns, not 20"):
        ExpertCodes(codes, torch.zeros(2, 8, 2, device=device), 1, 20)


def test_experts_of_another_rank_add_nothing(device: torch.device):
    check(6, (4, 2, 32, 16), torch.float32, device, SMALL, first_expert=4)


def test_no_tokens_and_an_unknown_activation(device: torch.device):
    check(0, (4, 2, 32, 16), torch.float32, device, SMALL)
    ids = torch.zeros(1, 1, dtype=torch.int32, device=device)
    weight = torch.zeros(1, 2, 2, device=device)
    with pytest.raises(ValueError, match="activation 'relu' should be one of"):
        fused_experts(weight[0, :1], ids.float(), ids, weight, weight, activation="relu")


@gpu
@pytest.mark.parametrize("num_tokens", [1, 32, 300, 5000])
def test_at_real_shapes(num_tokens: int, device: torch.device):
    check(num_tokens, (128, 8, 2048, 768), torch.bfloat16, device, None)


@gpu
@pytest.mark.parametrize("kind", FOUR_BITS)
@pytest.mark.parametrize("num_tokens", [1, 32, 300, 5000])
def test_codes_of_four_bits_at_real_shapes(num_tokens: int, kind: str, device: torch.device):
    codes = in_four_bits(**FOUR_BITS[kind])
    check(num_tokens, (32, 4, 2880, 720), torch.bfloat16, device, None, has_bias=True, **codes)


@gpu
@pytest.mark.parametrize("coded_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [(1, None), (128, 128), (1, 32)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 32, 300, 5000])
def test_codes_at_real_shapes(
    num_tokens: int, block: tuple[int, int | None], coded_dtype: torch.dtype, device: torch.device
):
    codes = in_eight_bits(block, coded_dtype)
    check(num_tokens, (128, 8, 2048, 768), torch.bfloat16, device, None, **codes)


@gpu
@pytest.mark.parametrize("num_tokens", [2, 32, 700])
def test_layers_that_start_during_each_other(num_tokens: int, device: torch.device):
    """Each finds the experts of its own tokens, in memory that the layer before it had for its."""
    num_layers, num_experts, top_k, hidden, inner = 12, 16, 3, 512, 200
    x = torch.randn(num_tokens, hidden, device=device).bfloat16()
    layers = []
    for _ in range(num_layers):
        w13 = (torch.randn(num_experts, 2 * inner, hidden, device=device) / hidden**0.5).bfloat16()
        w2 = (torch.randn(num_experts, hidden, inner, device=device) / inner**0.5).bfloat16()
        routes = topk_softmax(torch.randn(num_tokens, num_experts, device=device), top_k, True)
        layers.append((*routes, w13, w2))
    plain = [fused_experts(x, *layer) for layer in layers]
    torch.cuda.synchronize()
    for prefetch in (0, 2, 8):
        config = ExpertsConfig(prefetch=prefetch)
        for _ in range(3):
            started = [fused_experts(x, *layer, config=config, pdl=True) for layer in layers]
            assert all(map(torch.equal, started, [fused_experts(x, *each, config=config) for each in layers]))
    for got, want in zip(started, plain):
        assert_close(got, want.double())
