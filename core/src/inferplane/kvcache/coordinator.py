"""`KVCacheManager`: the one object through which the scheduler asks for KV memory, over all groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inferplane.api.kv import QUANTIZED_KV, AttentionSpec, KVCacheConfig, KVCacheSpec
from inferplane.kvcache.block_pool import BlockPool
from inferplane.kvcache.events import KVCacheListener
from inferplane.kvcache.managers import GroupManager, manager_class_for
from inferplane.kvcache.prefix import HashChain
from inferplane.kvcache.request_blocks import NEVER, CachedPrefix, GroupBlocks, GroupPrefix, RequestBlocks


class KVCacheManager:
    """Blocks of all groups for all requests, and prefixes that requests share.

    Groups whose blocks have one shape draw on one pool of ids; each other shape has a pool of its own. A block becomes
    part of the prefix cache, and one that no later token sees goes back to its pool, through `settle`, which the
    scheduler calls when the KV of its tokens has really been computed, never before.

    A model without layers that keep anything has no groups: everything fits, and no prefix is ever found.

    Raises `LookupError` for a spec that no manager knows.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        enable_prefix_caching: bool = True,
        max_step_tokens: int = NEVER,
        more_managers: Mapping[type[KVCacheSpec], type[GroupManager]] | None = None,
        listener: KVCacheListener | None = None,
    ) -> None:
        """``max_step_tokens``: the most tokens by which a request grows in one step."""
        self.enable_prefix_caching = enable_prefix_caching and bool(config.groups)
        self._listener = listener
        on_removed = listener.block_removed if listener is not None else None
        kept = config.kept_blocks or config.pool_blocks
        self.pools = [BlockPool(num, on_removed, num_kept) for num, num_kept in zip(config.pool_blocks, kept)]
        self._pool_of = [group.pool for group in config.groups]
        self.managers = [
            manager_class_for(group.spec, more_managers)(
                group.spec, index, self.pools[group.pool], max_step_tokens
            )
            for index, group in enumerate(config.groups)
        ]
        for manager in self.managers:
            manager.listener = listener
        self._block_sizes = [manager.block_size for manager in self.managers]
        self._coarsest = self._block_sizes.index(max(self._block_sizes)) if self._block_sizes else 0
        self._cache_epoch = 0
        dtypes = {group.spec.dtype for group in config.groups if isinstance(group.spec, AttentionSpec)}
        # identities leave this engine: another may share the tokens and store their KV otherwise
        self._quantized = sorted(dtypes.intersection(QUANTIZED_KV))

    @property
    def block_size(self) -> int:
        """Tokens per block of the group with the longest blocks, which are the steps in which prefixes are shared."""
        return self._block_sizes[self._coarsest] if self._block_sizes else 1

    @property
    def num_blocks(self) -> int:
        """Over all pools."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request references, over all pools; cached ones count, because they can be had."""
        return sum(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of the fullest pool that requests reference, 0 to 1."""
        return max((1.0 - pool.num_free / pool.num_blocks for pool in self.pools), default=0.0)

    def shortage(self, num_tokens: int, num_encoder_tokens: int = 0) -> tuple[int, int] | None:
        """Blocks that a request of this many tokens needs, and blocks that there are, of a pool that is too small for
        it even when it is alone; None when there is none."""
        needed = [0] * len(self.pools)
        for number, manager in zip(self._pool_of, self.managers, strict=True):
            needed[number] += manager.max_num_blocks(num_tokens, num_encoder_tokens)
        for num, pool in zip(needed, self.pools, strict=True):
            if num > pool.num_blocks:
                return num, pool.num_blocks
        return None

    def open(
        self,
        token_ids: list[int],
        extra_keys: Sequence[str | int | bytes | None] = (),
        num_encoder_tokens: int = 0,
    ) -> RequestBlocks:
        """The record of a request that holds nothing yet. It keeps ``token_ids`` itself, to see later tokens.

        ``extra_keys`` is everything besides tokens that changes the KV: only requests with equal keys share blocks.
        """
        by_size: dict[int, HashChain] = {}
        if self.enable_prefix_caching:
            keys = (*extra_keys, *self._quantized)
            by_size = {size: HashChain(token_ids, size, keys) for size in self._block_sizes}
        return RequestBlocks([by_size.get(size) for size in self._block_sizes], num_encoder_tokens)

    def find_cached_prefix(self, blocks: RequestBlocks, num_tokens: int) -> CachedPrefix:
        """The longest prefix that all groups hold, of a request of this many tokens that holds nothing yet.

        The last token is never part of it: it has to run, because its logits choose the next one.
        """
        length = num_tokens - 1 if self.enable_prefix_caching else 0
        found: list[GroupPrefix] = []
        is_settled = length == 0
        while not is_settled:
            # A group may hold less than the one before it; then the others are asked again for what is left.
            limit = length
            found = []
            for group, manager in zip(blocks.groups, self.managers, strict=True):
                assert group.chain is not None, "with prefix caching every group has a chain"
                found.append(manager.find_cached_prefix(group.chain, length))
                length = found[-1].num_tokens
            is_settled = length in (0, limit) or len(self.managers) == 1
        if length == 0:
            return self.empty_prefix()
        return CachedPrefix(length, tuple(found))

    def block_hashes(self, blocks: RequestBlocks, start_tokens: int, end_tokens: int) -> list[bytes]:
        """Identities of the longest blocks that are filled by the tokens from ``start_tokens`` up to ``end_tokens``;
        none without prefix caching. Requests share a block exactly when they share its identity."""
        if not self.enable_prefix_caching:
            return []
        chain = blocks.groups[self._coarsest].chain
        assert chain is not None, "with prefix caching every group has a chain"
        size = chain.block_size
        return [chain.hash_of(index) for index in range(start_tokens // size, end_tokens // size)]

    def empty_prefix(self) -> CachedPrefix:
        """For a request that has to compute every position."""
        return CachedPrefix(0, tuple(GroupPrefix(0, []) for _ in self.managers))

    def promised(self) -> PromisedBlocks:
        """An account of blocks that requests in the batch will need."""
        return PromisedBlocks(self)

    def count_to_hold(
        self, blocks: RequestBlocks, num_tokens: int, prefix: CachedPrefix | None = None
    ) -> list[int]:
        """Free blocks of each pool that it takes until a request has grown to this many tokens."""
        return self._count(blocks, num_tokens, prefix, is_at_once=False)

    def _count(
        self, blocks: RequestBlocks, num_tokens: int, prefix: CachedPrefix | None, is_at_once: bool
    ) -> list[int]:
        """With ``is_at_once`` all that lies between now and then is held together."""
        counts = [0] * len(self.pools)
        has_prefix = prefix is not None and prefix.num_tokens > 0
        held: Sequence[GroupBlocks | GroupPrefix] = (
            prefix.groups if prefix is not None and has_prefix else blocks.groups
        )
        for pool, manager, group in zip(self._pool_of, self.managers, held, strict=True):
            count = manager.num_missing_blocks if is_at_once else manager.num_blocks_to_hold
            counts[pool] += count(group, num_tokens)
            if has_prefix:
                # A cached block that nobody references is free now, and would be so no longer.
                references = self.pools[pool].num_references
                counts[pool] += sum(references(block_id) == 0 for block_id in group.held)
        return counts

    def allocate(
        self, blocks: RequestBlocks, num_tokens: int, prefix: CachedPrefix | None = None
    ) -> list[list[int]] | None:
        """Makes room for the first ``num_tokens`` tokens of a request; with ``prefix``, starting from those blocks.

        Returns the ids newly drawn from the pools for each group (without those of the prefix), or None, with nothing
        changed, when they do not fit.
        """
        counts = self._count(blocks, num_tokens, prefix, is_at_once=True)
        if any(count > pool.num_free for count, pool in zip(counts, self.pools, strict=True)):
            return None
        if prefix is not None:
            self._adopt(blocks, prefix)
        added: list[list[int]] = []
        capacity_tokens = NEVER
        for manager, group in zip(self.managers, blocks.groups, strict=True):
            new_ids = manager.pool.allocate(manager.num_missing_blocks(group, num_tokens))
            group.ids.extend(new_ids)
            added.append(new_ids)
            capacity_tokens = min(capacity_tokens, manager.capacity_tokens(group))
        blocks.capacity_tokens = capacity_tokens
        return added

    def _adopt(self, blocks: RequestBlocks, prefix: CachedPrefix) -> None:
        """References the blocks of a prefix for a request that holds none."""
        assert not any(blocks.block_ids), "a cached prefix is for a request that holds no blocks"
        for manager, group, found in zip(self.managers, blocks.groups, prefix.groups, strict=True):
            manager.pool.acquire(found.held)
            group.ids = list(found.ids)
            group.num_left = found.num_left
            group.num_cached = len(found.ids)
        blocks.cache_epoch = self._cache_epoch
        blocks.settle_at_tokens = self._settle_at(blocks, prefix.num_tokens)

    def settle(self, blocks: RequestBlocks, num_computed_tokens: int) -> None:
        """Takes note that the KV of the first ``num_computed_tokens`` of a request exists: their full blocks can be
        found from now on, and those that no token to come sees go back to their pools."""
        for manager, group in zip(self.managers, blocks.groups, strict=True):
            if self._is_caching(blocks) and group.chain is not None:
                manager.cache_blocks(group, group.chain, num_computed_tokens // manager.block_size)
            manager.release_unseen(group, num_computed_tokens)
        blocks.settle_at_tokens = self._settle_at(blocks, num_computed_tokens)

    def _is_caching(self, blocks: RequestBlocks) -> bool:
        return self.enable_prefix_caching and blocks.cache_epoch == self._cache_epoch

    def _settle_at(self, blocks: RequestBlocks, num_computed_tokens: int) -> int:
        is_caching = self._is_caching(blocks)
        return min(
            (manager.settle_at(num_computed_tokens, is_caching) for manager in self.managers), default=NEVER
        )

    def free(self, blocks: RequestBlocks) -> None:
        """Gives back everything that a request holds. Of its cached blocks the tail is evicted before the head."""
        for manager, group in zip(self.managers, blocks.groups, strict=True):
            manager.release(group)
            group.ids = []
            group.num_left = group.num_cached = 0
        blocks.capacity_tokens = 0
        blocks.settle_at_tokens = NEVER

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; KV that was computed before and is still held will not be cached either."""
        for pool in self.pools:
            pool.reset_cache()
        self._cache_epoch += 1
        if self._listener is not None:
            self._listener.cache_cleared()


class PromisedBlocks:
    """Blocks that requests in the batch do not hold yet and will need, for each pool."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._counts = [0] * len(kv.pools)

    def add(self, blocks: RequestBlocks, num_tokens: int) -> None:
        """What it takes until a request has grown to this many tokens."""
        counts = self._kv.count_to_hold(blocks, num_tokens)
        self._counts = [mine + more for mine, more in zip(self._counts, counts)]

    def leave_room_for(self, blocks: RequestBlocks, num_tokens: int, prefix: CachedPrefix) -> bool:
        """Whether a request that starts from a prefix could grow to this many tokens beside them."""
        counts = self._kv.count_to_hold(blocks, num_tokens, prefix)
        return all(
            mine + more <= pool.num_free for mine, more, pool in zip(self._counts, counts, self._kv.pools)
        )
