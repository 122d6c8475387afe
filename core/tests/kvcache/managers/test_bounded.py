"""Groups whose tokens see only so far back: what they hold, give back and find."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.api.kv import (
    ChunkedLocalSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LinearAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from inferplane.kvcache import BlockPool, KVCacheManager
from inferplane.kvcache.managers import BoundedManager
from inferplane.kvcache.prefix import HashChain


def sliding(window: int, block_size: int = 4) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32", window=window
    )


def chunked(chunk: int, block_size: int = 4) -> KVCacheSpec:
    return ChunkedLocalSpec(block_size=block_size, num_kv_heads=1, head_dim=8, dtype="float32", chunk=chunk)


def state(block_size: int = 4) -> KVCacheSpec:
    return MambaSpec(block_size=block_size, shapes=((2, 3),), dtypes=("float32",))


SPECS = st.one_of(
    st.builds(sliding, st.integers(1, 20), st.integers(1, 5)),
    st.builds(chunked, st.integers(1, 20), st.integers(1, 5)),
    st.builds(state, st.integers(1, 5)),
)


def needed_blocks(spec: KVCacheSpec, num_computed: int) -> set[int]:
    """Blocks that the token at ``num_computed`` needs, by the meaning of each spec and token by token."""
    if isinstance(spec, SlidingWindowSpec):
        tokens = [t for t in range(num_computed) if num_computed - t < spec.window]
    elif isinstance(spec, ChunkedLocalSpec):
        tokens = [t for t in range(num_computed) if t // spec.chunk == num_computed // spec.chunk]
    else:
        tokens = [num_computed - 1] if num_computed else []
    return {token // spec.block_size for token in tokens}


@given(
    spec=SPECS,
    steps=st.lists(st.integers(1, 7), min_size=1, max_size=30),
    is_caching=st.booleans(),
)
def test_what_is_seen_is_held_and_no_more_than_the_formula_says(
    spec: KVCacheSpec, steps: list[int], is_caching: bool
) -> None:
    config = KVCacheConfig(200, (KVCacheGroup(("layer",), spec),))
    kv = KVCacheManager(config, enable_prefix_caching=is_caching, max_step_tokens=max(steps))
    total = sum(steps)
    blocks = kv.open(list(range(total)))
    num_computed = 0
    prefix = kv.empty_prefix()
    most = 0
    for step in steps:
        assert kv.allocate(blocks, num_computed + step, prefix) is not None
        prefix = None
        (group,) = blocks.groups
        held = set(range(group.num_left, len(group.ids)))
        assert needed_blocks(spec, num_computed) <= held
        assert (
            set(range(num_computed // spec.block_size, -(-(num_computed + step) // spec.block_size))) <= held
        )
        most = max(most, len(held))
        assert kv.num_free_blocks == 200 - len(held)
        num_computed += step
        if num_computed >= blocks.settle_at_tokens:
            kv.settle(blocks, num_computed)
    assert most <= spec.max_num_blocks(total, max(steps))
    kv.free(blocks)
    kv.pools[0].check()
    assert kv.num_free_blocks == 200


@given(spec=SPECS, cached=st.sets(st.integers(0, 9)), max_tokens=st.integers(0, 50))
def test_the_longest_prefix_whose_seen_blocks_are_cached(
    spec: KVCacheSpec, cached: set[int], max_tokens: int
) -> None:
    """Against every candidate length, tried one by one."""
    pool = BlockPool(10)
    manager = BoundedManager(spec, 0, pool, 8)
    chain = HashChain(list(range(60)), spec.block_size)
    ids = pool.allocate(10)
    for index in cached:
        pool.cache(ids[index], manager.key_of(chain.hash_of(index)))
    prefix = manager.find_cached_prefix(chain, max_tokens)
    candidates = [
        length
        for length in range(0, min(max_tokens, 10 * spec.block_size) + 1, spec.block_size)
        if needed_blocks(spec, length) <= cached
    ]
    if max_tokens <= 10 * spec.block_size:
        assert prefix.num_tokens == max(candidates)
    needed = sorted(needed_blocks(spec, prefix.num_tokens))
    assert prefix.held == [ids[index] for index in needed]
    assert len(prefix.ids) == prefix.num_tokens // spec.block_size


def test_blocks_that_left_the_window_are_free_and_still_found() -> None:
    kv = KVCacheManager(KVCacheConfig(10, (KVCacheGroup(("layer",), sliding(window=5)),)))
    token_ids = list(range(21))
    blocks = kv.open(token_ids)
    assert kv.allocate(blocks, 20, kv.find_cached_prefix(blocks, 20)) is not None
    assert kv.num_free_blocks == 5
    kv.settle(blocks, 20)  # the next token sees 16 to 20
    assert kv.num_free_blocks == 9
    assert blocks.groups[0].held == blocks.block_ids[0][4:]
    for num_tokens, num_found in ((21, 20), (13, 12), (12, 8)):
        other = kv.open(token_ids[:num_tokens])
        assert kv.find_cached_prefix(other, num_tokens).num_tokens == num_found
    # whoever comes with the same tokens holds the last window's blocks only
    other = kv.open(token_ids)
    assert kv.allocate(other, 21, kv.find_cached_prefix(other, 21)) is not None
    assert other.groups[0].num_held == 2
    assert other.groups[0].held[0] == blocks.groups[0].held[0]
    kv.free(blocks)
    kv.free(other)
    assert kv.num_free_blocks == 10


def test_a_full_state_is_a_checkpoint_and_never_written_again() -> None:
    kv = KVCacheManager(KVCacheConfig(10, (KVCacheGroup(("layer",), state()),)), max_step_tokens=8)
    token_ids = list(range(12))
    first = kv.open(token_ids)
    assert kv.allocate(first, 8, kv.find_cached_prefix(first, 12)) is not None
    kv.settle(first, 8)
    second = kv.open(list(range(12)))
    prefix = kv.find_cached_prefix(second, 12)
    assert prefix.num_tokens == 8
    assert kv.allocate(second, 12, prefix) is not None
    assert kv.allocate(first, 12) is not None
    assert first.block_ids[0][1] == second.block_ids[0][1]
    assert first.block_ids[0][2] != second.block_ids[0][2]
    assert kv.shortage(12) is None


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (sliding(window=1024, block_size=16), 64 + 1 + 127),
        (sliding(window=1, block_size=16), 1 + 127),
        (chunked(chunk=8192, block_size=16), 512 + 1 + 127),
        (state(block_size=512), 1 + 1 + 4),
        (LinearAttentionSpec(block_size=10**6, shapes=((1,),), dtypes=("float32",)), 1),
    ],
)
def test_the_most_blocks_of_a_long_request(spec: KVCacheSpec, most: int) -> None:
    assert spec.max_num_blocks(100_000, 2033) == most
