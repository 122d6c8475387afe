"""How many KV blocks there are, and the longest sequence that they hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inferplane.api.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inferplane.config import ConfigError, ModelConfig

_MIB = 2**20


@dataclass(frozen=True)
class PoolSize:
    kv_config: KVCacheConfig
    max_model_len: int
    """As asked for, or less where the pool holds less."""


def group_layers(specs: Mapping[str, KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers with equal specs share block tables."""
    layers: dict[KVCacheSpec, list[str]] = {}
    for name, spec in specs.items():
        layers.setdefault(spec, []).append(name)
    return tuple(KVCacheGroup(tuple(names), spec) for spec, names in layers.items())


def size_pool(specs: Mapping[str, KVCacheSpec], available_bytes: int, model: ModelConfig) -> PoolSize:
    """Divides the memory into blocks.

    A sequence of ``max_model_len`` tokens always fits: where there is less memory, `ConfigError` says what is needed if
    the length was asked for, and otherwise the length becomes what fits.
    """
    groups = group_layers(specs)
    bytes_of_id = sum(group.block_bytes for group in groups)
    kv_config = KVCacheConfig(available_bytes // bytes_of_id, groups)
    if _blocks_for(groups, model.max_model_len) <= kv_config.num_blocks:
        return PoolSize(kv_config, model.max_model_len)
    fitting = _longest_fitting(kv_config, model.max_model_len)
    if model.is_max_model_len_explicit or fitting < 2:
        needed = (
            _blocks_for(groups, model.max_model_len if model.is_max_model_len_explicit else 2) * bytes_of_id
        )
        raise ConfigError(
            "max_model_len" if fitting >= 2 else "kv_cache_bytes",
            f"one sequence of max_model_len {model.max_model_len} tokens needs {_shown(needed)} of KV cache, "
            f"but {_shown(available_bytes)} are available; the largest max_model_len that fits is {fitting}. "
            "Lower max_model_len, or raise kv_cache_bytes if there is more memory",
        )
    return PoolSize(kv_config, fitting)


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes >= _MIB / 20 else f"{num_bytes} bytes"


def _blocks_for(groups: tuple[KVCacheGroup, ...], num_tokens: int) -> int:
    return sum(group.spec.num_blocks_for(num_tokens) for group in groups)


def _longest_fitting(kv_config: KVCacheConfig, limit: int) -> int:
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if _blocks_for(kv_config.groups, middle) <= kv_config.num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
