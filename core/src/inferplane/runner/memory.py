"""How much memory a worker gives to the KV cache, and what it leaves for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.api.device import MemoryInfo
from inferplane.api.kv import DTYPE_BYTES, KVCacheConfig, KVCacheSpec
from inferplane.config import ConfigError, EngineConfig
from inferplane.runner.sampler import slice_elements

HOST_SHARE = 0.4
"""Part of what is free to use where the memory is the machine's own: a person may be working on it too."""
DEVICE_SHARE = 0.9
"""Part of a device's own memory to use, whatever it is used for."""
GRAPH_BYTES = 8 << 20
"""For what a recorded graph keeps besides the memory that all of them share."""
RESERVE_BYTES = 256 << 20
"""For libraries, allocator slack and host-side state of the process."""
LOGITS_COPIES = 10
"""Float32 copies that sampling may hold at its peak of the logits that it handles at once, when it looks for the end of
top_p sets."""


def kv_budget_bytes(
    memory: MemoryInfo,
    is_host_memory: bool,
    config: EngineConfig,
    specs: Mapping[str, KVCacheSpec],
    step_bytes: int | None = None,
) -> int:
    """Bytes for one rank's KV cache, and never more than ``max_num_seqs`` sequences of full length could fill.

    Of a device's own memory: ``memory_share`` of all of it, less what is taken once the weights are loaded. Of host
    memory, where others live too: that share of what is available then, which ranks divide. Either less what the
    largest step needs: ``step_bytes`` where that was measured, else an estimate.
    """
    share = config.cache.memory_share
    if is_host_memory:
        left = int(memory.available_bytes * (share or HOST_SHARE) / config.parallel.world_size)
    else:
        taken_bytes = memory.total_bytes - memory.available_bytes
        left = int(memory.total_bytes * (share or DEVICE_SHARE)) - taken_bytes - graph_bytes(config)
    left -= (activation_bytes(config, is_host_memory) if step_bytes is None else step_bytes) + RESERVE_BYTES
    num_seqs, max_len = config.scheduler.max_num_seqs, config.model.max_model_len
    max_step = config.scheduler.max_num_batched_tokens
    # one block more for each sequence: copies and blocks in transition must not push a running request out
    useful = num_seqs * sum(
        (spec.max_num_blocks(max_len, max_step) + 1) * spec.block_bytes for spec in specs.values()
    )
    return max(0, min(left, useful))


def check_kv_cache_bytes(asked: int, memory: MemoryInfo) -> None:
    """Raises `ConfigError` for more than the device has. What others use of it now may be free soon."""
    if asked > memory.total_bytes:
        raise ConfigError(
            "kv_cache_bytes",
            f"kv_cache_bytes is {asked} ({asked / 2**30:.1f} GiB), but the device has {memory.total_bytes / 2**30:.1f} "
            "GiB of memory in all. Ask for less, or leave it out to have it chosen",
        )


def longest_sequence(kv_config: KVCacheConfig, max_model_len: int) -> int:
    """A bound on the tokens of any sequence: a group that keeps all of them keeps no more than the pool holds."""
    whole = (group for group in kv_config.groups if group.spec.first_visible_token(max_model_len) == 0)
    blocks = kv_config.pool_blocks
    return min([max_model_len, *(blocks[group.pool] * group.spec.block_size for group in whole)])


def graph_bytes(config: EngineConfig) -> int:
    """An estimate of what recorded decode steps keep: memory for the largest, and something for each."""
    sizes = config.graphs.batch_sizes if config.graphs.is_enabled else ()
    return len(sizes) * GRAPH_BYTES + max(sizes, default=0) * activation_bytes_per_token(config)


def activation_bytes(config: EngineConfig, is_host_memory: bool) -> int:
    """An estimate of what the largest step holds besides weights and KV, on the generous side."""
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    is_choosing = config.model.pooler is None
    num_logits = min(num_seqs, num_tokens) * config.model.vocab_size * is_choosing
    at_once = min(num_logits, slice_elements(is_host_memory))
    logits_bytes = num_logits * (DTYPE_BYTES[config.model.dtype] + 4) + at_once * 4 * LOGITS_COPIES
    return num_tokens * activation_bytes_per_token(config) + logits_bytes


def activation_bytes_per_token(config: EngineConfig) -> int:
    """At its widest a layer holds the residual stream and its norm, queries, keys, values and the attention's result,
    or the two halves of the feed-forward and their product."""
    hf, num_bytes = config.model.hf_config, DTYPE_BYTES[config.model.dtype]
    hidden = _size(hf, "hidden_size", 4096)
    intermediate = _size(hf, "intermediate_size", 4 * hidden) // config.parallel.tensor_parallel_size
    return num_bytes * (8 * hidden + 4 * intermediate)


def _size(hf_config: Mapping[str, Any], name: str, default: int) -> int:
    value = hf_config.get(name)
    return value if isinstance(value, int) else default
