"""How much memory a worker gives to the KV cache, and what it leaves for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.api.device import MemoryInfo
from inferplane.api.kv import DTYPE_BYTES, KVCacheSpec
from inferplane.config import ConfigError, EngineConfig
from inferplane.runner.sampler import slice_elements

HOST_SHARE = 0.4
"""Part of the available memory to use where it is the machine's own: a person may be working on it too."""
DEVICE_SHARE = 0.92
"""The same for memory that nothing but this worker is using."""
RESERVE_BYTES = 256 << 20
"""For libraries, allocator slack and host-side state of the process."""
LOGITS_COPIES = 10
"""Float32 copies that sampling may hold at its peak of the logits that it handles at once, when it looks for the end of
top_p sets."""


def kv_budget_bytes(
    memory: MemoryInfo, is_host_memory: bool, config: EngineConfig, specs: Mapping[str, KVCacheSpec]
) -> int:
    """Bytes for one rank's KV cache: a share of what is available after the weights are loaded, less what the largest
    step needs, and never more than ``max_num_seqs`` sequences of full length could fill.

    Ranks in host memory all see the same memory, and divide the share.
    """
    share = HOST_SHARE / config.parallel.world_size if is_host_memory else DEVICE_SHARE
    left = int(memory.available_bytes * share) - activation_bytes(config, is_host_memory) - RESERVE_BYTES
    num_seqs, max_len = config.scheduler.max_num_seqs, config.model.max_model_len
    # one block more for each sequence: copies and blocks in transition must not push a running request out
    useful = num_seqs * sum((spec.num_blocks_for(max_len) + 1) * spec.block_bytes for spec in specs.values())
    return max(0, min(left, useful))


def check_kv_cache_bytes(asked: int, memory: MemoryInfo) -> None:
    """Raises `ConfigError` for more than the device has. What others use of it now may be free soon."""
    if asked > memory.total_bytes:
        raise ConfigError(
            "kv_cache_bytes",
            f"kv_cache_bytes is {asked} ({asked / 2**30:.1f} GiB), but the device has {memory.total_bytes / 2**30:.1f} "
            "GiB of memory in all. Ask for less, or leave it out to have it chosen",
        )


def activation_bytes(config: EngineConfig, is_host_memory: bool) -> int:
    """An estimate of what the largest step holds besides weights and KV, on the generous side.

    At its widest a layer holds the residual stream and its norm, queries, keys, values and the attention's result, or
    the two halves of the feed-forward and their product.
    """
    hf, num_bytes = config.model.hf_config, DTYPE_BYTES[config.model.dtype]
    hidden = _size(hf, "hidden_size", 4096)
    intermediate = _size(hf, "intermediate_size", 4 * hidden) // config.parallel.tensor_parallel_size
    per_token = num_bytes * (8 * hidden + 4 * intermediate)
    num_tokens, num_seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    num_logits = min(num_seqs, num_tokens) * config.model.vocab_size
    at_once = min(num_logits, slice_elements(is_host_memory))
    return num_tokens * per_token + num_logits * (num_bytes + 4) + at_once * 4 * LOGITS_COPIES


def _size(hf_config: Mapping[str, Any], name: str, default: int) -> int:
    value = hf_config.get(name)
    return value if isinstance(value, int) else default
