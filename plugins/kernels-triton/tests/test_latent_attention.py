"""Paged attention to latents against float64, over ragged lengths; slots that belong to nobody hold NaN."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from inferplane_kernels_triton.latent_attention import LatentConfig, latent_attention
from kernel_checks import MATRIX_DTYPES, assert_close, exact_in_fp8, gpu, poisoned
from paged_reference import Paged, attention_reference, make_paged

SMALL = LatentConfig(rows=16, keys=16, num_warps=2, num_stages=1, least_keys=16)


def make_latents(
    query_lens: list[int],
    seq_lens: list[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    num_heads: int = 4,
    rank: int = 32,
    rope_dim: int = 16,
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
) -> Paged:
    """As `make_paged`; keys are values, too."""
    step = make_paged(
        query_lens, seq_lens, num_heads=num_heads, num_kv_heads=1, head_dim=rank + rope_dim, block_size=block_size,
        dtype=dtype, kv_dtype=cache_dtype, device=device,
    )  # fmt: skip
    return replace(step, kv=step.k_cache.unsqueeze(1).expand(-1, 2, -1, -1, -1))


def check(
    step: Paged,
    rank: int,
    *,
    num_splits: int = 1,
    config: LatentConfig | None = SMALL,
    scale_of_cache: float | None = None,
    num_launches: int = 1,
    pdl: bool = False,
) -> None:
    device, scale = step.q.device, step.q.shape[2] ** -0.5
    query_lens = step.query_start.diff().tolist()
    out = poisoned(*step.q.shape[:2], rank, dtype=step.q.dtype, device=device)
    used = config or LatentConfig.default(step.q.dtype)
    num_tiles = used.num_tiles(query_lens, step.q.shape[1])
    workspace = used.workspace(rank, num_tiles * num_splits, device)
    workspace.partial.fill_(float("nan"))
    cache_scale = None if scale_of_cache is None else torch.tensor([scale_of_cache], device=device)
    for _ in range(num_launches):
        got = latent_attention(
            step.q, step.k_cache[:, :, 0], rank, step.block_table, step.query_start, step.seq_lens, scale,
            longest_query=max(query_lens), num_splits=num_splits, workspace=workspace, cache_scale=cache_scale, out=out,
            config=config, pdl=pdl,
        )  # fmt: skip
    assert got is out
    wide = replace(step, kv=step.kv.double() * (scale_of_cache or 1.0))
    assert_close(out, attention_reference(wide, scale)[..., :rank])


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, *MATRIX_DTYPES], ids=str)
def test_single_tokens(dtype: torch.dtype, num_splits: int, device: torch.device):
    step = make_latents([1] * 3, [1, 17, 90], dtype=dtype, device=device)
    check(step, 32, num_splits=num_splits, num_launches=2)


@pytest.mark.parametrize("num_splits", [1, 4])
def test_single_tokens_and_chunks(num_splits: int, device: torch.device):
    """Requests of a part of a tile, of more than one, and of heads that are no power of two."""
    for num_heads in (4, 3, 20):
        step = make_latents(
            [1, 1, 9, 3], [50, 7, 40, 3], dtype=torch.float32, device=device, num_heads=num_heads
        )
        check(step, 32, num_splits=num_splits, num_launches=2)


@pytest.mark.parametrize("sizes", [(24, 8), (16, 0), (48, 16)], ids=str)
def test_sizes_of_latents(sizes: tuple[int, int], device: torch.device):
    rank, rope_dim = sizes
    step = make_latents(
        [1, 2], [33, 20], dtype=torch.float32, device=device, rank=rank, rope_dim=rope_dim, block_size=32
    )
    check(step, rank, num_splits=2, config=None)


def test_an_fp8_cache(device: torch.device):
    step = make_latents([1, 3], [40, 9], dtype=torch.float16, device=device)
    slots = step.kv[:, 0]
    exact = torch.where(slots.isnan(), slots.float(), exact_in_fp8(*slots.shape, device=device))
    kv = exact.to(torch.float8_e4m3fn).unsqueeze(1).expand(-1, 2, -1, -1, -1)
    check(replace(step, kv=kv), 32, num_splits=2, scale_of_cache=0.25)


def test_the_sizes_of_deepseek_v3(device: torch.device):
    step = make_latents(
        [1, 1], [20, 70], dtype=torch.float32, device=device, num_heads=16, rank=512, rope_dim=64
    )
    check(step, 512, num_splits=2, config=None)


def test_what_does_not_fit_is_refused(device: torch.device):
    step = make_latents([1], [20], dtype=torch.float32, device=device)
    arguments = (step.block_table, step.query_start, step.seq_lens, 1.0)
    with pytest.raises(ValueError, match="q of 48 numbers and a cache of 40"):
        latent_attention(step.q, step.k_cache[:, :, 0, :40], 32, *arguments, longest_query=1)
    workspace = SMALL.workspace(32, 1, step.q.device)
    with pytest.raises(ValueError, match="too small for 1 tiles of 16 rows in 8 splits"):
        latent_attention(
            step.q, step.k_cache[:, :, 0], 32, *arguments, longest_query=1, num_splits=8, workspace=workspace,
            config=SMALL,
        )  # fmt: skip


def test_tiles_are_counted():
    config = LatentConfig(rows=32)
    assert config.rows_for(1, 4) == 16 and config.rows_for(1, 16) == 16 and config.rows_for(1, 128) == 32
    assert config.num_tiles([1, 1, 1], 128) == 12
    assert config.num_tiles([1, 5], 16) == 1 + 3


@gpu
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_real_shapes(dtype: torch.dtype, num_heads: int, device: torch.device):
    shape = {"num_heads": num_heads, "rank": 512, "rope_dim": 64, "block_size": 64}
    lengths = [1, 63, 64, 65, 1000, 4097]
    step = make_latents([1] * 6, lengths, dtype=dtype, device=device, **shape)
    for num_splits in (1, 8, 32):
        check(step, 512, num_splits=num_splits, config=None, num_launches=2)
    check(make_latents([1, 40, 7], [500, 700, 7], dtype=dtype, device=device, **shape), 512, config=None)


@gpu
def test_started_during_the_kernel_before_it(device: torch.device):
    step = make_latents(
        [1] * 3, [1, 64, 4097], dtype=torch.bfloat16, device=device, num_heads=16, rank=512, rope_dim=64
    )
    check(step, 512, num_splits=8, config=None, num_launches=2, pdl=True)
