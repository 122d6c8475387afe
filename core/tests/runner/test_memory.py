"""What the KV cache may take (public case cpu-04)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inferplane.api import MemoryInfo
from inferplane.api.kv import FullAttentionSpec
from inferplane.config import (
    ConfigError,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
)
from inferplane.runner.memory import RESERVE_BYTES, activation_bytes, check_kv_cache_bytes, kv_budget_bytes

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
    assert kv_budget_bytes(memory, False, two, SPECS) > 17 * GIB


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
