"""What the KV cache may take (public case cpu-04)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferplane.api import MemoryInfo
from inferplane.api.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from inferplane.config import (
    CacheConfig,
    ConfigError,
    DeviceConfig,
    EngineConfig,
    GraphConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from inferplane.runner.memory import (
    GRAPH_BYTES,
    RESERVE_BYTES,
    activation_bytes,
    check_kv_cache_bytes,
    kv_budget_bytes,
    longest_sequence,
)

GIB = 1 << 30
CONFIG = EngineConfig(
    model=ModelConfig(
        model="m", path="m", hf_config={"hidden_size": 576, "intermediate_size": 1536}, architecture="A",
        dtype="bfloat16", max_model_len=8192, vocab_size=49_152,
    ),
    device=DeviceConfig("reference"),
    scheduler=SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=2048),
)  # fmt: skip
SPECS = {
    f"layer{i}": FullAttentionSpec(block_size=16, num_kv_heads=3, head_dim=64, dtype="bfloat16")
    for i in range(30)
}


def test_a_share_of_the_available_memory_less_the_largest_step():
    budget = kv_budget_bytes(MemoryInfo(24 * GIB, 20 * GIB), True, CONFIG, SPECS)
    assert budget == int(20 * GIB * 0.4) - activation_bytes(CONFIG, True) - RESERVE_BYTES
    assert 7 * GIB < budget < 8 * GIB


def test_ranks_in_host_memory_divide_the_share():
    memory = MemoryInfo(24 * GIB, 20 * GIB)
    two = replace(CONFIG, parallel=ParallelConfig(tensor_parallel_size=2))
    assert 2 * kv_budget_bytes(memory, True, two, SPECS) < kv_budget_bytes(memory, True, CONFIG, SPECS)
    assert kv_budget_bytes(memory, False, two, SPECS, 0) == kv_budget_bytes(memory, False, CONFIG, SPECS, 0)


def test_of_a_devices_own_memory_a_share_of_all_less_what_is_taken():
    memory = MemoryInfo(80 * GIB, 70 * GIB)
    many = replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=8192))
    left = int(80 * GIB * 0.9) - 10 * GIB - RESERVE_BYTES
    assert kv_budget_bytes(memory, False, many, SPECS, step_bytes=3 * GIB) == left - 3 * GIB
    assert kv_budget_bytes(memory, False, many, SPECS) == left - activation_bytes(many, False)
    half = replace(many, cache=CacheConfig(memory_share=0.5))
    assert kv_budget_bytes(memory, False, half, SPECS, step_bytes=0) == 30 * GIB - RESERVE_BYTES


def test_graphs_are_accounted_for():
    memory = MemoryInfo(80 * GIB, 70 * GIB)
    many = replace(CONFIG, scheduler=SchedulerConfig(max_num_seqs=4096, max_num_batched_tokens=8192))
    without = kv_budget_bytes(memory, False, many, SPECS, 0)
    recorded = replace(many, graphs=GraphConfig(True, (1, 8, 64)))
    with_graphs = kv_budget_bytes(memory, False, recorded, SPECS, 0)
    assert without - with_graphs == 3 * GRAPH_BYTES + 64 * 2 * (8 * 576 + 4 * 1536)
    off = replace(many, graphs=GraphConfig(False, (1, 8, 64)))
    assert kv_budget_bytes(memory, False, off, SPECS, 0) == without


def test_no_sequence_is_longer_than_what_the_pool_keeps_of_it():
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    pool = KVCacheConfig(10, (KVCacheGroup(("layer",), spec),))
    assert longest_sequence(pool, 10**12) == 160
    assert longest_sequence(pool, 100) == 100
    window = SlidingWindowSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32", window=32)
    assert longest_sequence(KVCacheConfig(10, (KVCacheGroup(("layer",), window),)), 1000) == 1000


def test_no_more_than_all_requests_at_full_length_could_fill():
    small = replace(
        CONFIG, scheduler=SchedulerConfig(max_num_seqs=2), model=replace(CONFIG.model, max_model_len=100)
    )
    block_bytes = 30 * 2 * 16 * 3 * 64 * 2
    assert kv_budget_bytes(MemoryInfo(24 * GIB, 20 * GIB), True, small, SPECS) == 2 * (7 + 1) * block_bytes


def test_too_little_memory_is_nothing_rather_than_negative():
    assert kv_budget_bytes(MemoryInfo(2 * GIB, GIB // 2), True, CONFIG, SPECS) == 0


def test_the_largest_step_counts_tokens_and_logits():
    tokens = 2048 * 2 * (8 * 576 + 4 * 1536)
    logits = 256 * 49_152
    assert activation_bytes(CONFIG, False) == tokens + logits * (2 + 4 + 4 * 10)
    # where memory is the host's, they are sampled in slices
    assert activation_bytes(CONFIG, True) == tokens + logits * (2 + 4) + (1 << 22) * 4 * 10
    without_sizes = replace(CONFIG, model=replace(CONFIG.model, hf_config={}))
    assert activation_bytes(without_sizes, True) > activation_bytes(CONFIG, True)


def test_a_cache_larger_than_the_device_is_refused_before_it_is_allocated():
    memory = MemoryInfo(24 * GIB, GIB)
    check_kv_cache_bytes(24 * GIB, memory)
    with pytest.raises(ConfigError, match=r"24\.0 GiB of memory") as caught:
        check_kv_cache_bytes(900 * 1024 * GIB, memory)
    assert caught.value.option == "kv_cache_bytes"
