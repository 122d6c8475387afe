"""How many KV blocks there are, and the longest sequence that they hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from inferplane.api.kv import KVCacheConfig, KVCacheGroup, KVCacheSpec
from inferplane.config import ConfigError, ModelConfig, SchedulerConfig
from inferplane.engine.kv_grouping import group_layers

_MIB = 2**20


@dataclass(frozen=True)
class PoolSize:
    kv_config: KVCacheConfig
    max_model_len: int
    """As asked for, or less where the pools hold less."""


@dataclass(frozen=True)
class _Pool:
    groups: tuple[KVCacheGroup, ...]
    max_step_tokens: int

    @property
    def block_bytes(self) -> int:
        """Of one block id, over all the memory in which it is valid."""
        return max(len(group.layer_names) for group in self.groups) * self.groups[0].spec.block_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        return sum(group.spec.max_num_blocks(num_tokens, self.max_step_tokens) for group in self.groups)


def bytes_per_request(groups: tuple[KVCacheGroup, ...], num_tokens: int, max_step_tokens: int) -> int:
    """The most memory that one request holds at any moment while it grows to this many tokens."""
    pools = _pools(groups, max_step_tokens)
    return sum(pool.num_blocks_for(num_tokens) * pool.block_bytes for pool in pools)


def size_pool(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    prefix_cache_bytes: int | None = None,
) -> PoolSize:
    """Divides the memory into blocks.

    A sequence of ``max_model_len`` tokens always fits: where there is less memory, `ConfigError` says what is needed if
    the length was asked for, and otherwise the length becomes what fits. Where layers keep blocks of different shapes,
    the rest is divided so that ``max_num_seqs`` sequences can grow alike as long as possible.

    ``prefix_cache_bytes``: of all memory, what is to be used before cached blocks are evicted; every pool keeps at
    least the longest sequence.
    """
    max_step_tokens = scheduler.max_num_batched_tokens
    groups = group_layers(specs, model.max_model_len, max_step_tokens)
    if not groups:
        return PoolSize(KVCacheConfig(0), model.max_model_len)

    def num_bytes(num_tokens: int) -> int:
        return bytes_per_request(groups, num_tokens, max_step_tokens)

    length = _largest(lambda num_tokens: num_bytes(num_tokens) <= available_bytes, model.max_model_len)
    is_fitting = length == model.max_model_len
    if not is_fitting and (model.is_max_model_len_explicit or length < 2):
        mend = "Lower max_model_len" if length >= 2 else "Take a smaller model or a shorter dtype"
        least = model.max_model_len if model.is_max_model_len_explicit else 2
        raise ConfigError(
            "max_model_len" if length >= 2 else "kv_cache_bytes",
            f"one sequence of {least} tokens needs {_shown(num_bytes(least))} of KV cache, "
            f"but {_shown(available_bytes)} are available; the largest max_model_len that fits is {length}. "
            f"{mend}, or raise kv_cache_bytes if there is more memory",
        )
    pools = _pools(groups, max_step_tokens)
    first, *more = nums = _divide(pools, available_bytes, length, scheduler.max_num_seqs)
    kept: tuple[int, ...] = ()
    if prefix_cache_bytes is not None:
        share = prefix_cache_bytes / available_bytes
        kept = tuple(
            min(num, max(int(num * share), pool.num_blocks_for(length))) for num, pool in zip(nums, pools)
        )
    return PoolSize(KVCacheConfig(first, groups, tuple(more), kept), length)


def _pools(groups: tuple[KVCacheGroup, ...], max_step_tokens: int) -> list[_Pool]:
    by_pool: dict[int, list[KVCacheGroup]] = {}
    for group in groups:
        by_pool.setdefault(group.pool, []).append(group)
    return [_Pool(tuple(by_pool[pool]), max_step_tokens) for pool in sorted(by_pool)]


def _divide(pools: list[_Pool], available_bytes: int, length: int, num_seqs: int) -> list[int]:
    """Blocks of each pool: enough for one sequence of ``length`` tokens, and of what is left the shares that equal
    sequences beside it need."""
    if len(pools) == 1:
        return [available_bytes // pools[0].block_bytes]
    least = [pool.num_blocks_for(length) for pool in pools]
    left = available_bytes - sum(num * pool.block_bytes for num, pool in zip(least, pools))

    def needed(num_tokens: int) -> list[int]:
        return [pool.num_blocks_for(num_tokens) * pool.block_bytes for pool in pools]

    equal_length = max(1, _largest(lambda num: (num_seqs - 1) * sum(needed(num)) <= left, length))
    shares = needed(equal_length)
    return [
        num + left * share // sum(shares) // pool.block_bytes
        for num, share, pool in zip(least, shares, pools)
    ]


def _shown(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.1f} MiB" if num_bytes >= _MIB / 20 else f"{num_bytes} bytes"


def _largest(is_possible: Callable[[int], bool], limit: int) -> int:
    """The largest number up to ``limit`` that is possible, if all below a possible one are; 0 is."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        if is_possible(middle):
            low = middle
        else:
            high = middle - 1
    return low
