"""`BlockPool`: reference counts, the free list and the map of cached blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable


class BlockPoolError(RuntimeError):
    """A block was used against its state (freed twice, used while free, …): a bug in whoever called."""


class BlockPool:
    """The ids ``0 … num_blocks - 1``, each either referenced or free, and each possibly cached.

    A cached block can be found by its key, whether a request holds it or not. A free block keeps its key until
    the block is handed out again, so the free list is at the same time the order in which cached blocks are evicted:
    blocks without a key first, then the one released longest ago.

    Blocks that were never used are taken in the order of their ids. A host gives them memory when they are first
    written, so the pool takes them before it evicts cached ones only until ``num_kept_blocks`` have been in use, and
    beyond that only when everything else is referenced.

    Every method takes time in proportion to the blocks it is given and none to the size of the pool, except
    `reset_cache` and `check`.
    """

    def __init__(
        self,
        num_blocks: int,
        on_removed: Callable[[bytes], None] | None = None,
        num_kept_blocks: int | None = None,
    ) -> None:
        """``on_removed`` is called with the key of each block that is handed out while it was cached. Without
        ``num_kept_blocks`` all of them are."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._num_kept_blocks = num_blocks if num_kept_blocks is None else num_kept_blocks
        self._on_removed = on_removed
        self._num_references = [0] * num_blocks
        self._key_of_block: list[bytes | None] = [None] * num_blocks
        self._block_of_key: dict[bytes, int] = {}
        # The interpreter's ordered dict is a doubly linked list in C: taking the first, removing from the middle and
        # adding at either end are O(1), and several times faster than links kept in Python lists.
        self._free: OrderedDict[int, None] = OrderedDict()
        """Free blocks that were in use before."""
        self._num_used = 0
        """Blocks below this id have been in use."""

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out, cached ones that nobody references among them."""
        return len(self._free) + self.num_blocks - self._num_used

    @property
    def num_cached(self) -> int:
        """Blocks that can be found by a key, referenced or free."""
        return len(self._block_of_key)

    def num_references(self, block_id: int) -> int:
        return self._num_references[block_id]

    def is_cached(self, block_id: int) -> bool:
        return self._key_of_block[block_id] is not None

    def allocate(self, num_blocks: int) -> list[int]:
        """Takes free blocks, each with one reference; those that were cached are so no longer.

        Raises `BlockPoolError` when fewer are free: callers look at `num_free` first.
        """
        if num_blocks > self.num_free:
            raise BlockPoolError(f"{num_blocks} blocks were asked for, but only {self.num_free} are free")
        num_references, key_of_block = self._num_references, self._key_of_block
        block_ids = []
        for _ in range(num_blocks):
            block_id = self._next_block()
            key = key_of_block[block_id]
            if key is not None:
                del self._block_of_key[key]
                key_of_block[block_id] = None
                if self._on_removed is not None:
                    self._on_removed(key)
            num_references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def _next_block(self) -> int:
        """Takes a block out of those that are free."""
        free = self._free
        if self._num_used < self.num_blocks:
            first = next(iter(free), None)
            is_worth_keeping = first is not None and self._key_of_block[first] is not None
            if first is None or (is_worth_keeping and self._num_used < self._num_kept_blocks):
                self._num_used += 1
                return self._num_used - 1
        return free.popitem(last=False)[0]

    def find(self, key: bytes) -> int | None:
        """The block cached under a key, or None. It takes no reference: `acquire` before anything else happens."""
        return self._block_of_key.get(key)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to blocks that were found by their key, or that someone holds already."""
        num_references = self._num_references
        for block_id in block_ids:
            if num_references[block_id] == 0:
                if self._key_of_block[block_id] is None:
                    raise BlockPoolError(
                        f"block {block_id} is free and not cached: its content belongs to nobody"
                    )
                del self._free[block_id]
            num_references[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Gives back one reference of each. Blocks that nobody references any more become free in this order,
        so the first of them is evicted first: callers pass the tail of a request before its head, because a cached
        head is of use without its tail and not the other way round.
        """
        num_references, free = self._num_references, self._free
        for block_id in block_ids:
            if num_references[block_id] == 0:
                raise BlockPoolError(f"block {block_id} is freed, but it is free already")
            num_references[block_id] -= 1
            if num_references[block_id] == 0:
                free[block_id] = None
                if self._key_of_block[block_id] is None:
                    free.move_to_end(block_id, last=False)

    def cache(self, block_id: int, key: bytes) -> bool:
        """Makes a block findable. False when another block already holds the same content: that one stays."""
        if self._num_references[block_id] == 0:
            raise BlockPoolError(
                f"block {block_id} is to be cached, but it is free: its content belongs to nobody"
            )
        if self._key_of_block[block_id] is not None:
            raise BlockPoolError(f"block {block_id} is to be cached a second time")
        if key in self._block_of_key:
            return False
        self._key_of_block[block_id] = key
        self._block_of_key[key] = block_id
        return True

    def reset_cache(self) -> None:
        """Forgets every key. References stay as they are."""
        self._block_of_key.clear()
        self._key_of_block = [None] * self.num_blocks

    def check(self) -> None:
        """Raises `BlockPoolError` unless every block is either free or referenced and the map matches the keys."""
        for block_id, count in enumerate(self._num_references):
            is_free = block_id in self._free or block_id >= self._num_used
            if count < 0 or (count == 0) != is_free:
                raise BlockPoolError(
                    f"block {block_id} has {count} references and is {'' if is_free else 'not '}free"
                )
        keys = {key: block_id for block_id, key in enumerate(self._key_of_block) if key is not None}
        if keys != self._block_of_key:
            raise BlockPoolError("the map of cached blocks does not match the keys of the blocks")
