from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.api.kv import FullAttentionSpec, KVCacheGroup
from inferplane.config import ConfigError, ModelConfig, SchedulerConfig
from inferplane.engine.kv_grouping import group_layers
from inferplane.engine.kv_sizing import size_pool

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype="float32")
BLOCK_BYTES = 2 * 16 * 2 * 8 * 4
SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
LAYERS = {f"layer.{i}": SPEC for i in range(3)}


def model(max_model_len: int, *, explicit: bool = False) -> ModelConfig:
    return ModelConfig("m", "/m", {}, "Arch", "float32", max_model_len, 100, explicit)


def test_equal_layers_share_a_group() -> None:
    other = FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    groups = group_layers({"a": SPEC, "b": other, "c": SPEC}, 100, 8)
    assert groups == (KVCacheGroup(("a", "c"), SPEC, 0), KVCacheGroup(("b",), other, 1))


def test_memory_becomes_blocks() -> None:
    size = size_pool(LAYERS, 3 * BLOCK_BYTES * 10 + 5, model(160), SCHEDULER)
    assert size.kv_config.num_blocks == 10
    assert size.max_model_len == 160


@pytest.mark.parametrize(
    ("kept_blocks_of_memory", "max_model_len", "kept"),
    [(None, 160, ()), (4, 33, (4,)), (4, 160, (10,)), (1000, 160, (20,))],
    ids=["all of it", "as asked for", "at least the longest sequence", "at most the pool"],
)
def test_what_is_kept_before_cached_blocks_are_evicted(
    kept_blocks_of_memory: int | None, max_model_len: int, kept: tuple[int, ...]
) -> None:
    block_bytes = 3 * BLOCK_BYTES
    kept_bytes = None if kept_blocks_of_memory is None else block_bytes * kept_blocks_of_memory
    size = size_pool(LAYERS, block_bytes * 20, model(max_model_len), SCHEDULER, kept_bytes)
    assert size.kv_config.kept_blocks == kept


def test_a_length_from_the_model_is_lowered_to_what_fits() -> None:
    size = size_pool(LAYERS, 3 * BLOCK_BYTES * 10, model(161), SCHEDULER)
    assert size.max_model_len == 160


def test_a_length_asked_for_is_an_error_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 0\.4 MiB .* 0\.1 MiB are available.* fits is 160"
    ) as caught:
        size_pool(LAYERS, 3 * BLOCK_BYTES * 10, model(1000, explicit=True), SCHEDULER)
    assert caught.value.option == "max_model_len"


def test_no_room_at_all_is_an_error_even_when_the_length_is_open() -> None:
    with pytest.raises(ConfigError, match="fits is 0") as caught:
        size_pool(LAYERS, 3 * BLOCK_BYTES - 1, model(1000), SCHEDULER)
    assert caught.value.option == "kv_cache_bytes"


@given(num_bytes=st.integers(3 * BLOCK_BYTES, 3 * BLOCK_BYTES * 50), length=st.integers(2, 2000))
def test_a_sequence_of_the_final_length_fits_and_one_longer_does_not(num_bytes: int, length: int) -> None:
    size = size_pool(LAYERS, num_bytes, model(length), SCHEDULER)
    num_slots = size.kv_config.num_blocks * 16
    assert size.max_model_len == min(length, num_slots)
    assert size.kv_config.num_blocks * 3 * BLOCK_BYTES <= num_bytes


def test_little_memory_is_told_in_bytes() -> None:
    with pytest.raises(
        ConfigError, match=r"of 2 tokens needs 6144 bytes .* 1024 bytes are available.*smaller model"
    ):
        size_pool(LAYERS, 1024, model(1000), SCHEDULER)
