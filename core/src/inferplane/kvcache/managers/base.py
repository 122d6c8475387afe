"""`GroupManager`: what the coordinator asks of each KV group."""

from __future__ import annotations

from abc import ABC, abstractmethod

from inferplane.api.kv import KVCacheSpec
from inferplane.kvcache.block_pool import BlockPool
from inferplane.kvcache.prefix import HashChain


class GroupManager(ABC):
    """Rules of one KV group over the pool that all groups share.

    ``block_ids`` in every method is the list of one request in this group, in the order of its tokens. The coordinator
    owns it; a manager that changes it says so.
    """

    def __init__(self, spec: KVCacheSpec, group_index: int, pool: BlockPool) -> None:
        self.spec = spec
        self.block_size = spec.block_size
        self.pool = pool
        # Two groups hold different KV for the same tokens, so the group is part of a block's key.
        self._key_suffix = group_index.to_bytes(2, "little")

    def key_of(self, block_hash: bytes) -> bytes:
        return block_hash + self._key_suffix

    @abstractmethod
    def max_num_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request holds at any moment while it grows to this many tokens."""

    @abstractmethod
    def num_missing_blocks(self, block_ids: list[int], num_tokens: int) -> int:
        """Blocks to add so that ``num_tokens`` tokens have a slot each."""

    @abstractmethod
    def find_cached_prefix(self, chain: HashChain, max_tokens: int) -> list[int]:
        """The blocks of the longest cached prefix of at most this many tokens. It takes no reference."""

    @abstractmethod
    def cache_blocks(self, block_ids: list[int], chain: HashChain, start: int, end: int) -> None:
        """Makes the blocks ``start … end - 1`` of a request, all full and computed, findable."""

    @abstractmethod
    def release(self, block_ids: list[int]) -> None:
        """Gives every block of a request back."""
