"""`FullAttentionManager`: every token keeps its KV for as long as the request lives."""

from __future__ import annotations

from inferplane.kvcache.managers.base import GroupManager
from inferplane.kvcache.prefix import HashChain


class FullAttentionManager(GroupManager):
    """Block ``i`` holds tokens ``[i * block_size, (i + 1) * block_size)``; a prefix is cached up to its first gap."""

    def max_num_blocks(self, num_tokens: int) -> int:
        return self.spec.num_blocks_for(num_tokens)

    def num_missing_blocks(self, block_ids: list[int], num_tokens: int) -> int:
        return max(0, self.spec.num_blocks_for(num_tokens) - len(block_ids))

    def find_cached_prefix(self, chain: HashChain, max_tokens: int) -> list[int]:
        block_ids: list[int] = []
        for index in range(max_tokens // self.block_size):
            block_id = self.pool.find(self.key_of(chain.hash_of(index)))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def cache_blocks(self, block_ids: list[int], chain: HashChain, start: int, end: int) -> None:
        for index in range(start, end):
            self.pool.cache(block_ids[index], self.key_of(chain.hash_of(index)))

    def release(self, block_ids: list[int]) -> None:
        self.pool.release(reversed(block_ids))
