"""Attention over packed sequences, in both directions and causal."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.packed_attention import (
    PackedConfig,
    causal_attention,
    dim_parts,
    encoder_attention,
)
from kernel_checks import MATRIX_DTYPES, assert_close, gpu, poisoned

LENGTHS = [1, 7, 33, 2, 20]
SMALL = PackedConfig(queries=16, keys=16, num_warps=2, num_stages=1)


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: list[int], scale: float, window: int | None
) -> torch.Tensor:
    """One sequence at a time, in float64 on the host, with an explicit mask."""
    outputs = []
    for queries, keys, values in zip(*(x.double().cpu().split(lengths) for x in (q, k, v))):
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        at = torch.arange(len(queries))
        is_hidden = (at.unsqueeze(1) - at).abs() > (len(queries) if window is None else window)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def check(
    dtype: torch.dtype,
    device: torch.device,
    *,
    lengths: list[int] = LENGTHS,
    window: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    head_dim: int = 32,
    config: PackedConfig | None = SMALL,
) -> None:
    """q, k and v are views of one projection, as layers have them."""
    sizes = (num_heads, num_kv_heads, num_kv_heads)
    qkv = torch.randn(sum(lengths), sum(sizes), head_dim, device=device).to(dtype)
    q, k, v = qkv.split(sizes, dim=1)
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    out = poisoned(*q.shape, dtype=dtype, device=device)
    scale = head_dim**-0.5
    got = encoder_attention(q, k, v, lengths, starts, scale, window, out=out, config=config)
    assert_close(got, reference(q, k, v, lengths, scale, window))


@pytest.mark.parametrize("dtype", [torch.float32, *MATRIX_DTYPES], ids=str)
@pytest.mark.parametrize("window", [None, 1, 17])
def test_it_equals_the_reference(window: int | None, dtype: torch.dtype, device: torch.device):
    check(dtype, device, window=window)


def test_heads_that_share_keys_and_sizes_that_are_no_powers_of_two(device: torch.device):
    check(torch.float32, device, num_heads=6, num_kv_heads=2, head_dim=24)
    check(torch.float32, device, num_heads=2, num_kv_heads=1, head_dim=8, window=3)


def test_one_sequence_and_tiles_that_end_with_it(device: torch.device):
    for length in (1, 15, 16, 17, 32):
        check(torch.float32, device, lengths=[length], num_heads=1, num_kv_heads=1, config=None)


def test_shapes_that_do_not_fit_are_refused(device: torch.device):
    q, k = torch.zeros(4, 3, 16, device=device), torch.zeros(4, 2, 16, device=device)
    with pytest.raises(ValueError, match="do not fit each other"):
        encoder_attention(q, k, k, [4], torch.tensor([0, 4], dtype=torch.int32), 1.0, None)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [None, 64])
def test_real_shapes(window: int | None, dtype: torch.dtype, device: torch.device):
    lengths = [8192, 512, *([24] * 100)]
    check(
        dtype, device, lengths=lengths, window=window, num_heads=12, num_kv_heads=12, head_dim=64, config=None
    )


def causal_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_lens: list[int],
    key_lens: list[int],
    scale: float,
) -> torch.Tensor:
    outputs = []
    for queries, keys, values in zip(
        q.double().cpu().split(query_lens), *(x.double().cpu().split(key_lens) for x in (k, v))
    ):
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        own = torch.arange(len(keys) - len(queries), len(keys)).unsqueeze(1)
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        weights = scores.masked_fill(torch.arange(len(keys)) > own, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs)


def check_causal(
    dtype: torch.dtype,
    device: torch.device,
    query_lens: list[int],
    key_lens: list[int],
    *,
    num_heads: int = 4,
    num_kv_heads: int = 4,
    head_dim: int = 48,
    value_dim: int = 32,
    config: PackedConfig | None = SMALL,
) -> None:
    """q is a view of more heads than it has, as where a layer takes some of them at a time."""
    q = torch.randn(sum(query_lens), num_heads + 3, head_dim, device=device).to(dtype)[:, 1 : 1 + num_heads]
    k, v = (
        torch.randn(sum(key_lens), num_kv_heads, dim, device=device).to(dtype)
        for dim in (head_dim, value_dim)
    )
    starts = [torch.tensor([0, *lens], device=device).cumsum(0).int() for lens in (query_lens, key_lens)]
    out = poisoned(sum(query_lens), num_heads, value_dim, dtype=dtype, device=device)
    scale = head_dim**-0.5
    got = causal_attention(q, k, v, query_lens, starts[0], key_lens, starts[1], scale, out=out, config=config)
    assert_close(got, causal_reference(q, k, v, query_lens, key_lens, scale))


@pytest.mark.parametrize("dtype", [torch.float32, *MATRIX_DTYPES], ids=str)
@pytest.mark.parametrize("dims", [(48, 32), (24, 20), (32, 48)], ids=str)
def test_last_tokens_of_sequences(dims: tuple[int, int], dtype: torch.dtype, device: torch.device):
    head_dim, value_dim = dims
    check_causal(dtype, device, [1, 16, 33, 5], [40, 16, 50, 5], head_dim=head_dim, value_dim=value_dim)


def test_causal_heads_that_share_keys(device: torch.device):
    check_causal(torch.float32, device, [20], [70], num_heads=6, num_kv_heads=2, config=None)


def test_more_queries_than_keys_are_refused(device: torch.device):
    q, starts = torch.zeros(4, 1, 16, device=device), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"3\] keys cannot have \[4"):
        causal_attention(q, q[:3], q[:3], [4], starts, [3], starts, 1.0)


def test_parts_of_heads():
    sizes = {
        8: (16, 0),
        16: (16, 0),
        24: (32, 0),
        48: (32, 16),
        64: (64, 0),
        80: (64, 16),
        192: (128, 64),
        256: (256, 0),
    }
    assert {size: dim_parts(size) for size in sizes} == sizes


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prompts_of_the_heads_of_deepseek_v3(dtype: torch.dtype, device: torch.device):
    check_causal(
        dtype, device, [700, 1, 2048, 63], [700, 900, 5000, 64], num_heads=16, num_kv_heads=16, head_dim=192,
        value_dim=128, config=None,
    )  # fmt: skip
