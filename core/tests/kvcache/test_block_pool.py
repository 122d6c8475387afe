"""The pool against a model that keeps everything in plain lists and sets."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inferplane.kvcache import BlockPool, BlockPoolError


class PoolMachine(RuleBasedStateMachine):
    """`free` is the list of free blocks that were in use before, next to be evicted first, and `unused` that of the
    others; `held` has an entry for each reference."""

    @initialize(num_blocks=st.integers(1, 12), num_kept=st.none() | st.integers(0, 13))
    def start(self, num_blocks: int, num_kept: int | None) -> None:
        self.pool = BlockPool(num_blocks, num_kept_blocks=num_kept)
        self.num_blocks = num_blocks
        self.num_kept = num_blocks if num_kept is None else num_kept
        self.free: list[int] = []
        self.unused = list(range(num_blocks))
        self.held: list[int] = []
        self.keys: dict[int, bytes] = {}

    @rule(num_blocks=st.integers(0, 13))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > len(self.free) + len(self.unused):
            with pytest.raises(BlockPoolError, match="only"):
                self.pool.allocate(num_blocks)
            return
        taken = [self.expected_next() for _ in range(num_blocks)]
        assert self.pool.allocate(num_blocks) == taken
        for block_id in taken:
            self.keys.pop(block_id, None)
        self.held += taken

    def expected_next(self) -> int:
        uncached = [block_id for block_id in self.free if block_id not in self.keys]
        num_used = self.num_blocks - len(self.unused)
        if uncached:
            place = self.free
        elif self.unused and (num_used < self.num_kept or not self.free):
            place = self.unused
        else:
            place = self.free
        return place.pop(0)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        indices = data.draw(st.lists(st.integers(0, len(self.held) - 1), unique=True))
        released = [self.held[index] for index in indices]
        self.held = [block for index, block in enumerate(self.held) if index not in indices]
        self.pool.release(released)
        for position, block_id in enumerate(released):
            if block_id in self.held or block_id in released[position + 1 :]:
                continue
            if block_id in self.keys:
                self.free.append(block_id)
            else:
                self.free.insert(0, block_id)

    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        block_id = data.draw(st.integers(0, self.num_blocks - 1))
        if block_id in self.unused or (block_id in self.free and block_id not in self.keys):
            with pytest.raises(BlockPoolError, match="not cached"):
                self.pool.acquire([block_id])
            return
        self.pool.acquire([block_id])
        if block_id in self.free:
            self.free.remove(block_id)
        self.held.append(block_id)

    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"f"]))
    def cache(self, data: st.DataObject, key: bytes) -> None:
        block_id = data.draw(st.integers(0, self.num_blocks - 1))
        if block_id not in self.held or block_id in self.keys:
            with pytest.raises(BlockPoolError, match="is to be cached"):
                self.pool.cache(block_id, key)
            return
        is_new = key not in self.keys.values()
        assert self.pool.cache(block_id, key) is is_new
        if is_new:
            self.keys[block_id] = key

    @rule(data=st.data())
    def release_free_block(self, data: st.DataObject) -> None:
        if free := self.free + self.unused:
            with pytest.raises(BlockPoolError, match="free already"):
                self.pool.release([data.draw(st.sampled_from(free))])

    @rule()
    def reset_cache(self) -> None:
        self.pool.reset_cache()
        self.keys.clear()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.num_free == len(self.free) + len(self.unused)
        assert self.pool.num_cached == len(self.keys)
        for block_id in range(self.num_blocks):
            assert self.pool.num_references(block_id) == self.held.count(block_id)
            assert self.pool.is_cached(block_id) == (block_id in self.keys)
        for key in (b"a", b"b", b"c", b"d", b"e", b"f"):
            holders = [block_id for block_id, own in self.keys.items() if own == key]
            assert self.pool.find(key) == (holders[0] if holders else None)


TestPoolAgainstModel = PoolMachine.TestCase
TestPoolAgainstModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        BlockPool(0)


def test_check_finds_a_block_that_is_neither_free_nor_held() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool._num_references[1] = 0
    with pytest.raises(BlockPoolError, match="block 1"):
        pool.check()


def test_a_pool_grows_beyond_what_it_keeps_only_for_what_is_held_at_once() -> None:
    removed: list[bytes] = []
    pool = BlockPool(10, removed.append, num_kept_blocks=3)
    for number in range(5):
        (block_id,) = pool.allocate(1)
        pool.cache(block_id, b"%d" % number)
        pool.release([block_id])
    assert removed == [b"0", b"1"]
    assert max(pool.allocate(5)) == 4
    pool.check()
