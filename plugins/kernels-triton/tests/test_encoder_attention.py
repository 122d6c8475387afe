"""Attention in both directions over packed sequences."""

from __future__ import annotations

import pytest
import torch

from inferplane_kernels_triton.encoder_attention import EncoderConfig, encoder_attention
from kernel_checks import MATRIX_DTYPES, assert_close, gpu, poisoned

LENGTHS = [1, 7, 33, 2, 20]
SMALL = EncoderConfig(queries=16, keys=16, num_warps=2, num_stages=1)


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
    config: EncoderConfig | None = SMALL,
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
