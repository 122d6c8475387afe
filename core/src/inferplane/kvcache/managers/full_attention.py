"""`FullAttentionManager`: every token keeps its KV for as long as the request lives."""

from __future__ import annotations

from inferplane.kvcache.managers.base import GroupManager
from inferplane.kvcache.prefix import HashChain
from inferplane.kvcache.request_blocks import GroupPrefix


class FullAttentionManager(GroupManager):
    """Block ``i`` holds tokens ``[i * block_size, (i + 1) * block_size)``; a prefix is cached up to its first gap."""

    def find_cached_prefix(self, chain: HashChain, max_tokens: int) -> GroupPrefix:
        block_ids: list[int] = []
        for index in range(max_tokens // self.block_size):
            block_id = self.pool.find(self.key_of(chain.hash_of(index)))
            if block_id is None:
                break
            block_ids.append(block_id)
        return GroupPrefix(len(block_ids) * self.block_size, block_ids)
