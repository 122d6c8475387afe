"""`BoundedManager`: a token sees only so far back, and what lies before that is given back."""

from __future__ import annotations

from inferplane.kvcache.managers.base import GroupManager
from inferplane.kvcache.prefix import HashChain
from inferplane.kvcache.request_blocks import GroupBlocks, GroupPrefix

ANY_BLOCK = 0
"""Keeps the place of a block that a request never held, in lists that only count places there."""


class BoundedManager(GroupManager):
    """Block ``i`` belongs to tokens ``[i * block_size, (i + 1) * block_size)``, and is held while a token to come sees
    one of them. It goes back to the pool cached, so that others find it until the pool needs the room.

    Which tokens are seen is the spec's to say: `KVCacheSpec.first_visible_token`.
    """

    def num_blocks_to_hold(self, blocks: GroupBlocks | GroupPrefix, num_tokens: int) -> int:
        num_missing = self.num_missing_blocks(blocks, num_tokens)
        num_held = len(blocks.ids) - blocks.num_left
        return min(num_missing, max(0, self.max_num_blocks(num_tokens) - num_held))

    def find_cached_prefix(self, chain: HashChain, max_tokens: int) -> GroupPrefix:
        """From the end: the first place where all blocks that the next token sees are there."""
        first_known = end = max_tokens // self.block_size
        found: dict[int, int] = {}
        while end > 0:
            num_left = self.spec.first_visible_token(end * self.block_size) // self.block_size
            while first_known > num_left:
                block_id = self.pool.find(self.key_of(chain.hash_of(first_known - 1)))
                if block_id is None:
                    break
                first_known -= 1
                found[first_known] = block_id
            if first_known <= num_left:
                held = [found[index] for index in range(num_left, end)]
                return GroupPrefix(end * self.block_size, [ANY_BLOCK] * num_left + held, num_left)
            # The block before is not there, so no prefix ends behind it that sees it.
            first_known = end = first_known - 1
        return GroupPrefix(0, [])

    def release_unseen(self, blocks: GroupBlocks, num_computed_tokens: int) -> None:
        num_left = self.spec.first_visible_token(num_computed_tokens) // self.block_size
        if num_left > blocks.num_left:
            self.pool.release(blocks.ids[blocks.num_left : num_left])
            blocks.num_left = num_left

    def settle_at(self, num_computed_tokens: int, is_caching: bool) -> int:
        return (num_computed_tokens // self.block_size + 1) * self.block_size
