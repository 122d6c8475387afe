"""`KVCacheManager`: the one object through which the scheduler asks for KV memory, over all groups."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from inferplane.api.kv import KVCacheConfig, KVCacheSpec
from inferplane.kvcache.block_pool import BlockPool
from inferplane.kvcache.managers import GroupManager, manager_class_for
from inferplane.kvcache.prefix import HashChain

NEVER = sys.maxsize
"""A number of tokens that no request reaches."""


@dataclass(frozen=True, slots=True)
class CachedPrefix:
    """A prefix that every group holds. Valid until the next call that changes the pool."""

    num_tokens: int
    block_ids: tuple[list[int], ...]
    """For each group, in the order of the tokens."""


class RequestBlocks:
    """What one request holds of the pool. Made by `KVCacheManager.open`, and changed by that manager only."""

    __slots__ = (
        "block_ids",
        "cache_at_tokens",
        "cache_epoch",
        "capacity_tokens",
        "chains",
        "num_cached_blocks",
    )

    def __init__(self, num_groups: int, chains: list[HashChain]) -> None:
        self.chains = chains
        """For each group the hashes of its blocks; groups of one block size share theirs. Empty without caching."""
        self.block_ids: list[list[int]] = [[] for _ in range(num_groups)]
        """For each group, in the order of the tokens."""
        self.capacity_tokens = 0
        """Tokens that have a slot in every group."""
        self.num_cached_blocks = [0] * num_groups
        """For each group the blocks, from the first on, that were made findable (or found to have a twin)."""
        self.cache_at_tokens = NEVER
        """The number of computed tokens at which the next block can be cached."""
        self.cache_epoch = 0
        """The cache that this KV may enter: none after a reset since it was computed."""


class KVCacheManager:
    """Blocks of all groups for all requests, and prefixes that requests share.

    One id space serves every group. A block becomes part of the prefix cache through `cache_full_blocks`, which the
    scheduler calls when the KV of its tokens has really been computed, never before.

    Raises `ValueError` for a config without groups, and `LookupError` for a spec that no manager knows.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_prefix_caching: bool = True,
        more_managers: Mapping[type[KVCacheSpec], type[GroupManager]] | None = None,
    ) -> None:
        if not config.groups:
            raise ValueError("the KV cache has no groups: a model declares at least one layer that keeps KV")
        self.enable_prefix_caching = enable_prefix_caching
        self.pool = BlockPool(config.num_blocks)
        self.managers = [
            manager_class_for(group.spec, more_managers)(group.spec, index, self.pool)
            for index, group in enumerate(config.groups)
        ]
        self._block_sizes = [manager.block_size for manager in self.managers]
        self._cache_epoch = 0

    @property
    def block_size(self) -> int:
        """Tokens per block of the first group."""
        return self._block_sizes[0]

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request references; cached ones count, because they can be had."""
        return self.pool.num_free

    @property
    def usage(self) -> float:
        """Share of the pool that requests reference, 0 to 1."""
        return 1.0 - self.pool.num_free / self.pool.num_blocks

    def max_num_blocks(self, num_tokens: int) -> int:
        """Blocks that a request needs over all groups to grow to this many tokens."""
        return sum(manager.max_num_blocks(num_tokens) for manager in self.managers)

    def open(
        self, token_ids: list[int], extra_keys: Sequence[str | int | bytes | None] = ()
    ) -> RequestBlocks:
        """The record of a request that holds nothing yet. It keeps ``token_ids`` itself, to see later tokens.

        ``extra_keys`` is everything besides tokens that changes the KV: only requests with equal keys share blocks.
        """
        chains: list[HashChain] = []
        if self.enable_prefix_caching:
            by_size = {size: HashChain(token_ids, size, extra_keys) for size in self._block_sizes}
            chains = [by_size[size] for size in self._block_sizes]
        return RequestBlocks(len(self.managers), chains)

    def find_cached_prefix(self, blocks: RequestBlocks, num_tokens: int) -> CachedPrefix:
        """The longest prefix that all groups hold, of a request of this many tokens that holds nothing yet.

        The last token is never part of it: it has to run, because its logits choose the next one.
        """
        length = num_tokens - 1 if self.enable_prefix_caching else 0
        found: list[list[int]] = [[] for _ in self.managers]
        is_settled = length == 0
        while not is_settled:
            # A group may hold less than the one before it; then the others are asked again for what is left.
            limit = length
            for index, manager in enumerate(self.managers):
                found[index] = manager.find_cached_prefix(blocks.chains[index], length)
                length = len(found[index]) * manager.block_size
            is_settled = length in (0, limit) or len(self.managers) == 1
        if length == 0:
            return self.empty_prefix()
        return CachedPrefix(length, tuple(found))

    def block_hashes(self, blocks: RequestBlocks, start_tokens: int, end_tokens: int) -> list[bytes]:
        """Identities of the blocks of the first group that are filled by the tokens from ``start_tokens`` up to
        ``end_tokens``; none without prefix caching. Requests share a block exactly when they share its identity."""
        if not blocks.chains:
            return []
        chain = blocks.chains[0]
        return [
            chain.hash_of(index)
            for index in range(start_tokens // chain.block_size, end_tokens // chain.block_size)
        ]

    def empty_prefix(self) -> CachedPrefix:
        """For a request that has to compute every position."""
        return CachedPrefix(0, tuple([] for _ in self.managers))

    def num_blocks_to_hold(
        self, blocks: RequestBlocks, num_tokens: int, prefix: CachedPrefix | None = None
    ) -> int:
        """Free blocks that it takes until this many tokens of a request have a slot in every group."""
        if prefix is None:
            held = blocks.block_ids
            num_revived = 0
        else:
            held = list(prefix.block_ids)
            # A cached block that nobody references is free now, and would be so no longer.
            num_revived = sum(self.pool.num_references(block_id) == 0 for ids in held for block_id in ids)
        return num_revived + sum(
            manager.num_missing_blocks(ids, num_tokens)
            for manager, ids in zip(self.managers, held, strict=True)
        )

    def allocate(
        self, blocks: RequestBlocks, num_tokens: int, prefix: CachedPrefix | None = None
    ) -> list[list[int]] | None:
        """Makes room for the first ``num_tokens`` tokens of a request; with ``prefix``, starting from those blocks.

        Returns the ids newly drawn from the pool for each group (without those of the prefix), or None, with nothing
        changed, when they do not fit.
        """
        if self.num_blocks_to_hold(blocks, num_tokens, prefix) > self.pool.num_free:
            return None
        if prefix is not None:
            self._adopt(blocks, prefix)
        added: list[list[int]] = []
        capacity_tokens = NEVER
        for manager, block_ids in zip(self.managers, blocks.block_ids, strict=True):
            new_ids = self.pool.allocate(manager.num_missing_blocks(block_ids, num_tokens))
            block_ids.extend(new_ids)
            added.append(new_ids)
            capacity_tokens = min(capacity_tokens, len(block_ids) * manager.block_size)
        blocks.capacity_tokens = capacity_tokens
        return added

    def _adopt(self, blocks: RequestBlocks, prefix: CachedPrefix) -> None:
        """References the blocks of a prefix for a request that holds none."""
        assert not any(blocks.block_ids), "a cached prefix is for a request that holds no blocks"
        for index, ids in enumerate(prefix.block_ids):
            self.pool.acquire(ids)
            blocks.block_ids[index] = list(ids)
            blocks.num_cached_blocks[index] = len(ids)
        blocks.cache_epoch = self._cache_epoch
        blocks.cache_at_tokens = self._next_cache_at(blocks)

    def cache_full_blocks(self, blocks: RequestBlocks, num_computed_tokens: int) -> None:
        """Makes the full blocks of a request findable whose tokens, up to this number, have been computed."""
        if blocks.cache_epoch != self._cache_epoch or not self.enable_prefix_caching:
            blocks.cache_at_tokens = NEVER
            return
        for index, manager in enumerate(self.managers):
            start, end = blocks.num_cached_blocks[index], num_computed_tokens // manager.block_size
            if end > start:
                manager.cache_blocks(blocks.block_ids[index], blocks.chains[index], start, end)
                blocks.num_cached_blocks[index] = end
        blocks.cache_at_tokens = self._next_cache_at(blocks)

    def _next_cache_at(self, blocks: RequestBlocks) -> int:
        if not self.enable_prefix_caching:
            return NEVER
        return min(
            (num + 1) * size for num, size in zip(blocks.num_cached_blocks, self._block_sizes, strict=True)
        )

    def free(self, blocks: RequestBlocks) -> None:
        """Gives back everything that a request holds. Of its cached blocks the tail is evicted before the head."""
        for index, manager in enumerate(self.managers):
            manager.release(blocks.block_ids[index])
            blocks.block_ids[index] = []
            blocks.num_cached_blocks[index] = 0
        blocks.capacity_tokens = 0
        blocks.cache_at_tokens = NEVER

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; KV that was computed before and is still held will not be cached either."""
        self.pool.reset_cache()
        self._cache_epoch += 1
