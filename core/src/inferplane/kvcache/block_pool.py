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

    Every method takes time in proportion to the blocks it is given and none to the size of the pool, except
    `reset_cache` and `check`.
    """

    def __init__(self, num_blocks: int, on_removed: Callable[[bytes], None] | None = None) -> None:
        """``on_removed`` is called with the key of each block that is handed out while it was cached."""
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._on_removed = on_removed
        self._num_references = [0] * num_blocks
        self._key_of_block: list[bytes | None] = [None] * num_blocks
        self._block_of_key: dict[bytes, int] = {}
        # The interpreter's ordered dict is a doubly linked list in C: taking the first, removing from the middle and
        # adding at either end are O(1), and several times faster than links kept in Python lists.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` could hand out, cached ones that nobody references among them."""
        return len(self._free)

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
        if num_blocks > len(self._free):
            raise BlockPoolError(f"{num_blocks} blocks were asked for, but only {len(self._free)} are free")
        pop_free, num_references, key_of_block = self._free.popitem, self._num_references, self._key_of_block
        block_ids = []
        for _ in range(num_blocks):
            block_id, _ = pop_free(last=False)
            key = key_of_block[block_id]
            if key is not None:
                del self._block_of_key[key]
                key_of_block[block_id] = None
                if self._on_removed is not None:
                    self._on_removed(key)
            num_references[block_id] = 1
            block_ids.append(block_id)
        return block_ids

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
            if count < 0 or (count == 0) != (block_id in self._free):
                raise BlockPoolError(
                    f"block {block_id} has {count} references and is {'' if block_id in self._free else 'not '}free"
                )
        keys = {key: block_id for block_id, key in enumerate(self._key_of_block) if key is not None}
        if keys != self._block_of_key:
            raise BlockPoolError("the map of cached blocks does not match the keys of the blocks")
