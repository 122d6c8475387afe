"""`GroupManager`: what the coordinator asks of each KV group."""

from __future__ import annotations

from abc import ABC, abstractmethod

from inferplane.api.kv import KVCacheSpec
from inferplane.kvcache.block_pool import BlockPool
from inferplane.kvcache.events import KVCacheListener
from inferplane.kvcache.prefix import HashChain
from inferplane.kvcache.request_blocks import NEVER, GroupBlocks, GroupPrefix


class GroupManager(ABC):
    """Rules of one KV group over a pool that it may share with others.

    The coordinator takes blocks from the pool, appends them to a request's `GroupBlocks`, and counts what is cached; a
    manager says how many, which of them can be found, and which may go.
    """

    def __init__(self, spec: KVCacheSpec, group_index: int, pool: BlockPool, max_step_tokens: int) -> None:
        """``max_step_tokens``: the most tokens by which a request grows in one step."""
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = pool
        self._max_step_tokens = max_step_tokens
        self.listener: KVCacheListener | None = None
        # Two groups hold different KV for the same tokens, so the group is part of a block's key.
        self._key_suffix = group_index.to_bytes(2, "little")

    def key_of(self, block_hash: bytes) -> bytes:
        return block_hash + self._key_suffix

    def max_num_blocks(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """The most blocks that a request holds at any moment while it grows to this many tokens."""
        return self.spec.max_num_blocks(num_tokens, self._max_step_tokens)

    def num_missing_blocks(self, blocks: GroupBlocks | GroupPrefix, num_tokens: int) -> int:
        """Blocks to append now so that ``num_tokens`` tokens have a slot each."""
        return max(0, self.spec.num_blocks_for(num_tokens) - len(blocks.ids))

    def num_blocks_to_hold(self, blocks: GroupBlocks | GroupPrefix, num_tokens: int) -> int:
        """Blocks that it takes, on top of those held now, until the request has grown to this many tokens."""
        return self.num_missing_blocks(blocks, num_tokens)

    def capacity_tokens(self, blocks: GroupBlocks) -> int:
        """Tokens that have a slot."""
        return len(blocks.ids) * self.block_size

    @abstractmethod
    def find_cached_prefix(self, chain: HashChain, max_tokens: int) -> GroupPrefix:
        """The longest cached prefix of at most this many tokens. It takes no reference."""

    def cache_blocks(self, blocks: GroupBlocks, chain: HashChain, end: int) -> None:
        """Makes the blocks up to ``end``, all full and computed, findable, as far as they are not."""
        for index in range(max(blocks.num_cached, blocks.num_left), end):
            key = self.key_of(chain.hash_of(index))
            if self.pool.cache(blocks.ids[index], key) and self.listener is not None:
                parent = self.key_of(chain.hash_of(index - 1)) if index else None
                self.listener.block_stored(key, parent, chain.tokens_of(index))
        blocks.num_cached = max(blocks.num_cached, end)

    def release_unseen(self, blocks: GroupBlocks, num_computed_tokens: int) -> None:
        """Gives back the blocks that no token after the first ``num_computed_tokens`` sees."""
        return

    def settle_at(self, num_computed_tokens: int, is_caching: bool) -> int:
        """The next number of computed tokens at which there is a block to cache or to give back."""
        return (num_computed_tokens // self.block_size + 1) * self.block_size if is_caching else NEVER

    def release(self, blocks: GroupBlocks) -> None:
        """Gives every block of a request back."""
        self.pool.release(reversed(blocks.held))
