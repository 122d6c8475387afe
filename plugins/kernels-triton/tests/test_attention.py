"""Paged attention, decode and prefill, against float64 over ragged lengths.

Slots that belong to nobody hold NaN, and block tables end in a block full of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from inferplane_kernels_triton.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    choose_num_splits,
    decode_attention,
)
from inferplane_kernels_triton.prefill_attention import PrefillConfig, prefill_attention
from kernel_checks import MATRIX_DTYPES, assert_close, gpu, poisoned
from paged_reference import Paged, attention_reference, make_paged

SMALL = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
VARIANTS = {
    "plain": {},
    "window": {"window": 20},
    "cap": {"soft_cap": 1.5},
    "sinks": {"sinks": True},
    "all": {"window": 33, "soft_cap": 2.0, "sinks": True},
}


def variant_of(name: str, num_heads: int, device: torch.device) -> dict:
    variant = dict(VARIANTS[name])
    if variant.pop("sinks", False):
        variant["sinks"] = torch.randn(num_heads, device=device) * 2
    return variant


def check_decode(
    step: Paged,
    variant: dict,
    num_splits: int,
    config: DecodeConfig,
    num_launches: int = 1,
    *,
    pdl: bool = False,
) -> None:
    scale = step.q.shape[-1] ** -0.5
    out = poisoned(*step.q.shape, dtype=step.q.dtype, device=step.q.device)
    workspace = DecodeWorkspace.allocate(
        len(step.q), step.q.shape[1], step.kv.shape[3], step.q.shape[2], num_splits, step.q.device
    )
    workspace.partial.fill_(float("nan"))
    for _ in range(num_launches):
        decode_attention(
            step.q, step.k_cache, step.v_cache, step.block_table, step.seq_lens, scale, num_splits=num_splits,
            workspace=workspace, out=out, config=config, pdl=pdl, **variant,
        )  # fmt: skip
    assert_close(out, attention_reference(step, scale, **variant))


def check_prefill(step: Paged, variant: dict, config: PrefillConfig) -> None:
    scale = step.q.shape[-1] ** -0.5
    out = poisoned(*step.q.shape, dtype=step.q.dtype, device=step.q.device)
    got = prefill_attention(
        step.q, step.k_cache, step.v_cache, step.block_table, step.query_start, step.seq_lens, scale, out=out,
        config=config, **variant,
    )  # fmt: skip
    assert got is out
    assert_close(out, attention_reference(step, scale, **variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode(num_splits: int, variant: str, device: torch.device):
    step = make_paged([1] * 3, [1, 17, 90], dtype=torch.float32, device=device, **SMALL)
    check_decode(step, variant_of(variant, 4, device), num_splits, DecodeConfig(keys=16, least_keys=16))


def test_more_splits_than_a_sequence_has_tiles(device: torch.device):
    """Most programs have nothing to do, of the shortest sequence all but one; twice, for the counters."""
    step = make_paged([1] * 4, [1, 16, 17, 70], dtype=torch.float32, device=device, **SMALL)
    check_decode(step, {}, 8, DecodeConfig(keys=16, least_keys=16), num_launches=2)
    check_decode(
        step, variant_of("window", 4, device), 8, DecodeConfig(keys=16, least_keys=16), num_launches=2
    )


def test_a_split_has_a_number_of_keys_at_least(device: torch.device):
    """Sequences of one split, of two and of all three."""
    step = make_paged([1] * 4, [30, 33, 70, 200], dtype=torch.float32, device=device, **SMALL)
    for variant in ("plain", "window"):
        check_decode(
            step, variant_of(variant, 4, device), 3, DecodeConfig(keys=16, least_keys=32), num_launches=2
        )


def test_a_second_launch_finds_the_counters_as_the_first_one_left_them(device: torch.device):
    step = make_paged([1], [40], dtype=torch.float32, device=device, **SMALL)
    check_decode(step, {}, 2, DecodeConfig(keys=16, least_keys=16), num_launches=2)


@pytest.mark.parametrize("dtype", MATRIX_DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(5, 1, 24, 16), (3, 3, 16, 64), (8, 1, 64, 32)],
    ids=str,
)
def test_decode_of_other_shapes(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
    num_heads, num_kv_heads, head_dim, block_size = shape
    step = make_paged(
        [1, 1], [70, 35], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        block_size=block_size, dtype=dtype, device=device,
    )  # fmt: skip
    check_decode(step, {}, 2, DecodeConfig(keys=32, least_keys=32))


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill(variant: str, device: torch.device):
    step = make_paged([1, 40, 3], [50, 40, 20], dtype=torch.float32, device=device, **SMALL)
    check_prefill(step, variant_of(variant, 4, device), PrefillConfig(rows=32, keys=16))


@pytest.mark.parametrize("dtype", MATRIX_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 1, 24, 16), (3, 3, 16, 64)], ids=str)
def test_prefill_of_other_shapes(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device):
    num_heads, num_kv_heads, head_dim, block_size = shape
    step = make_paged(
        [20, 1, 9], [33, 1, 9], num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
        block_size=block_size, dtype=dtype, device=device,
    )  # fmt: skip
    check_prefill(step, {}, PrefillConfig(rows=16, keys=32))


def test_one_request_and_many(device: torch.device):
    for query_lens in ([7], [1] * 5, [2, 1, 30, 1]):
        seq_lens = [length + i for i, length in enumerate(query_lens)]
        step = make_paged(query_lens, seq_lens, dtype=torch.float32, device=device, **SMALL)
        check_prefill(step, {}, PrefillConfig(rows=16, keys=16))


@pytest.mark.parametrize("first", [1, 2])
def test_prefill_of_the_later_requests_alone(first: int, device: torch.device):
    """Their rows do not begin with the first of q, and those before are left as they are."""
    step = make_paged([1, 18, 40, 3], [50, 18, 40, 20], dtype=torch.float32, device=device, **SMALL)
    row = int(step.query_start[first])
    out = torch.full_like(step.q, math.nan)
    prefill_attention(
        step.q, step.k_cache, step.v_cache, step.block_table[first:], step.query_start[first:],
        step.seq_lens[first:], 0.3, out=out, config=PrefillConfig(rows=16, keys=16),
    )  # fmt: skip
    assert out[:row].isnan().all()
    assert_close(out[row:], attention_reference(step, 0.3)[row:])


def test_an_fp8_cache(device: torch.device):
    step = make_paged(
        [1, 1], [40, 9], dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, device=device, **SMALL
    )
    check_decode(step, {}, 2, DecodeConfig(keys=16, least_keys=16))
    check_prefill(step, {}, PrefillConfig(rows=16, keys=16))


def test_scales_of_an_fp8_cache(device: torch.device):
    step = make_paged([1, 1], [20, 7], dtype=torch.float32, device=device, **SMALL)
    scales = (torch.tensor([2.0, 0.5], device=device), torch.tensor([4.0, 0.3], device=device))
    wide = step.kv * torch.stack(scales).view(1, 2, 1, 2, 1)
    want = attention_reference(replace(step, kv=wide), 0.3)
    cache = (step.q, step.k_cache, step.v_cache, step.block_table)
    for num_splits in (1, 2):
        got = decode_attention(*cache, step.seq_lens, 0.3, num_splits=num_splits, kv_scales=scales)
        assert_close(got, want)
    assert_close(prefill_attention(*cache, step.query_start, step.seq_lens, 0.3, kv_scales=scales), want)


def test_what_does_not_fit_is_refused(device: torch.device):
    kv = torch.zeros(2, 2, 16, 2, 32, device=device)
    index = torch.zeros(1, 1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="3 heads of 32"):
        decode_attention(torch.zeros(1, 3, 32, device=device), kv[:, 0], kv[:, 1], index, index[0], 1.0)
    with pytest.raises(ValueError, match="block size 8"):
        decode_attention(
            torch.zeros(1, 2, 32, device=device), kv[:, 0, :8], kv[:, 1, :8], index, index[0], 1.0
        )


def test_splits_fill_the_device_and_no_more():
    assert choose_num_splits(256, 8, 8192, 132) == 1
    assert choose_num_splits(1, 8, 8192, 132) == 16
    assert choose_num_splits(1, 8, 128, 132) == 4
    assert choose_num_splits(1, 1, 1 << 20, 132) == 64


LLAMA = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}


@gpu
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_at_real_shapes(dtype: torch.dtype, block_size: int, variant: str, device: torch.device):
    options = variant_of(variant, 32, device)
    lengths = [1, 63, 64, 65, 1000, 4097]
    step = make_paged([1] * 6, lengths, dtype=dtype, device=device, block_size=block_size, **LLAMA)
    for num_splits in (1, 8, 32):
        check_decode(step, options, num_splits, DecodeConfig.default(dtype), num_launches=2)
    step = make_paged(
        [1, 63, 1, 300, 513],
        [500, 63, 3, 700, 513],
        dtype=dtype,
        device=device,
        block_size=block_size,
        **LLAMA,
    )
    check_prefill(step, options, PrefillConfig.default(dtype))


@gpu
@pytest.mark.parametrize("variant", ["plain", "window"])
@pytest.mark.parametrize("prefetch", [0, 128, 512])
def test_started_during_the_kernel_before_it(prefetch: int, variant: str, device: torch.device):
    options = variant_of(variant, 32, device)
    for heads in (LLAMA, {"num_heads": 32, "num_kv_heads": 4, "head_dim": 80}):
        step = make_paged(
            [1] * 5, [1, 64, 200, 1000, 4097], dtype=torch.bfloat16, device=device, block_size=16, **heads
        )
        for num_splits in (1, 8):
            config = DecodeConfig(prefetch=prefetch)
            check_decode(step, options, num_splits, config, num_launches=2, pdl=True)
