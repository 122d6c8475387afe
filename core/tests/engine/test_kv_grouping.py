"""Memory of models whose layers keep different things: shapes as published, at 32k tokens of context."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.api.kv import (
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from inferplane.config import ModelConfig, SchedulerConfig
from inferplane.engine.kv_grouping import group_layers
from inferplane.engine.kv_sizing import bytes_per_request, size_pool

BLOCK, CONTEXT, STEP = 16, 32 * 1024, 2048
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=STEP)


def full(num_kv_heads: int, head_dim: int) -> KVCacheSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bfloat16")


def sliding(num_kv_heads: int, head_dim: int, window: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=BLOCK, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype="bfloat16", window=window
    )


def every_nth_is_full(
    num_layers: int, n: int, windowed: KVCacheSpec, whole: KVCacheSpec
) -> dict[str, KVCacheSpec]:
    return {f"layer.{i}": whole if (i + 1) % n == 0 else windowed for i in range(num_layers)}


def window_blocks(window: int) -> int:
    """What the first token of a step sees before it, what the step fills, and one block that it shares with both."""
    return -(-(window - 1) // BLOCK) + -(-(STEP - 1) // BLOCK) + 1


@pytest.mark.parametrize(
    ("num_layers", "n", "num_kv_heads", "head_dim", "window", "group_size", "num_groups"),
    [
        (18, 6, 1, 256, 512, 3, 6),  # Gemma 3 270M
        (48, 6, 8, 256, 1024, 8, 6),  # Gemma 3 12B
        (24, 2, 8, 64, 128, 12, 2),  # GPT-OSS 20B
        (36, 2, 8, 64, 128, 18, 2),  # GPT-OSS 120B
    ],
)
def test_windowed_layers_are_bounded_by_the_window(
    num_layers: int, n: int, num_kv_heads: int, head_dim: int, window: int, group_size: int, num_groups: int
) -> None:
    specs = every_nth_is_full(
        num_layers, n, sliding(num_kv_heads, head_dim, window), full(num_kv_heads, head_dim)
    )
    groups = group_layers(specs, CONTEXT, STEP)
    assert [len(group.layer_names) for group in groups] == [group_size] * num_groups
    assert sorted(name for group in groups for name in group.layer_names) == sorted(specs)
    token_bytes = 2 * num_kv_heads * head_dim * 2
    num_full = num_layers // n
    expected = num_full * CONTEXT * token_bytes
    expected += (num_layers - num_full) * window_blocks(window) * BLOCK * token_bytes
    assert bytes_per_request(groups, CONTEXT, STEP) == expected
    assert expected < 0.6 * num_layers * CONTEXT * token_bytes


def test_numbers_that_do_not_divide_waste_little() -> None:
    """Gemma 3 27B: 52 windowed layers and 10 full ones."""
    specs = every_nth_is_full(62, 6, sliding(16, 128, 1024), full(16, 128))
    groups = group_layers(specs, CONTEXT, STEP)
    assert len(groups) <= 8
    token_bytes = 2 * 16 * 128 * 2
    exact = token_bytes * (10 * CONTEXT + 52 * window_blocks(1024) * BLOCK)
    assert exact <= bytes_per_request(groups, CONTEXT, STEP) < 1.1 * exact


def test_a_latent_cache_is_a_twentieth() -> None:
    """DeepSeek V3: 61 layers of 128 heads, a latent of 512 and 64 rotated numbers a token."""
    latent = MLAAttentionSpec(block_size=BLOCK, head_dim=576, rope_dim=64, dtype="bfloat16")
    layers = [f"layer.{i}" for i in range(61)]
    mla = bytes_per_request(group_layers(dict.fromkeys(layers, latent), CONTEXT, STEP), CONTEXT, STEP)
    # keys of 128 + 64 numbers and values of 128, for each of 128 heads
    assert mla == 61 * CONTEXT * 576 * 2
    assert mla * 20 <= 61 * CONTEXT * 128 * (192 + 128) * 2
    assert latent.latent_rank == 512


def test_a_hybrid_divides_its_memory_between_states_and_tokens() -> None:
    """Shapes of Granite 4 small: 36 state layers and 4 of attention."""
    state = MambaSpec(block_size=512, shapes=((3, 8448), (128, 64, 128)), dtypes=("bfloat16", "bfloat16"))
    specs = every_nth_is_full(40, 10, state, full(8, 128))
    num_bytes = 8 << 30
    model = ModelConfig("m", "/m", {}, "Arch", "bfloat16", CONTEXT, 100)
    size = size_pool(specs, num_bytes, model, SCHEDULER)
    assert size.max_model_len == CONTEXT
    states, tokens = size.kv_config.pool_blocks
    assert (
        num_bytes * 0.99
        < states * 36 * state.block_bytes + tokens * 4 * full(8, 128).block_bytes
        <= num_bytes
    )
    # eight sequences of the full length fit in both
    assert states >= 8 * state.max_num_blocks(CONTEXT, STEP)
    assert tokens >= 8 * CONTEXT // BLOCK


def test_shapes_share_memory_only_with_their_like() -> None:
    chunk = ChunkedLocalSpec(block_size=BLOCK, num_kv_heads=2, head_dim=64, dtype="bfloat16", chunk=8192)
    specs = {"a": full(2, 64), "b": chunk, "c": full(1, 64), "d": chunk}
    groups = group_layers(specs, CONTEXT, STEP)
    assert [(group.layer_names, group.pool) for group in groups] == [
        (("a",), 0),
        (("b",), 0),
        (("d",), 0),
        (("c",), 1),
    ]
    config = KVCacheConfig(5, groups, (7,))
    assert config.memory() == [(5, ("a", "b", "d")), (7, ("c",))]


def test_a_model_that_keeps_nothing_needs_nothing() -> None:
    size = size_pool({}, 0, ModelConfig("m", "/m", {}, "Arch", "float32", 512, 100), SCHEDULER)
    assert (size.kv_config, size.max_model_len) == (KVCacheConfig(0), 512)
    assert size.kv_config.pool_blocks == ()


@given(
    num_layers=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    num_bytes=st.integers(1 << 16, 1 << 22),
    length=st.integers(2, 3000),
)
def test_one_sequence_of_the_final_length_fits_in_every_pool(
    num_layers: list[int], num_bytes: int, length: int
) -> None:
    kinds = [
        sliding(1, 8, 64),
        full(1, 8),
        MambaSpec(block_size=64, shapes=((16, 16),), dtypes=("float32",)),
    ]
    specs = {f"{k}.{i}": kind for k, (kind, num) in enumerate(zip(kinds, num_layers)) for i in range(num)}
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32)
    size = size_pool(specs, num_bytes, ModelConfig("m", "/m", {}, "A", "float32", length, 9), scheduler)
    used = 0
    for pool, num_blocks in enumerate(size.kv_config.pool_blocks):
        groups: list[KVCacheGroup] = [group for group in size.kv_config.groups if group.pool == pool]
        needed = sum(group.spec.max_num_blocks(size.max_model_len, 32) for group in groups)
        assert needed <= num_blocks
        used += num_blocks * max(len(group.layer_names) for group in groups) * groups[0].spec.block_bytes
    assert used <= num_bytes
