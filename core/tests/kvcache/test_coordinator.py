from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.api.kv import CrossAttentionSpec, FullAttentionSpec, KVCacheConfig, KVCacheGroup, MambaSpec
from inferplane.kvcache import KVCacheManager, RequestBlocks


def make_manager(num_blocks: int, *block_sizes: int, enable_prefix_caching: bool = True) -> KVCacheManager:
    groups = tuple(
        KVCacheGroup(
            (f"layer{index}",),
            FullAttentionSpec(block_size=size, num_kv_heads=1, head_dim=8, dtype="float32"),
        )
        for index, size in enumerate(block_sizes)
    )
    return KVCacheManager(KVCacheConfig(num_blocks, groups), enable_prefix_caching=enable_prefix_caching)


def compute(kv: KVCacheManager, token_ids: list[int], salt: str | None = None) -> RequestBlocks:
    """A request that found what it could in the cache and computed the rest."""
    blocks = kv.open(token_ids, (salt,))
    assert kv.allocate(blocks, len(token_ids), kv.find_cached_prefix(blocks, len(token_ids))) is not None
    kv.settle(blocks, len(token_ids))
    return blocks


def num_cached(kv: KVCacheManager, token_ids: list[int], salt: str | None = None) -> int:
    return kv.find_cached_prefix(kv.open(token_ids, (salt,)), len(token_ids)).num_tokens


def test_blocks_of_another_kv_dtype_have_other_identities() -> None:
    def identities(dtype: str) -> list[bytes]:
        spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype=dtype)
        kv = KVCacheManager(KVCacheConfig(8, (KVCacheGroup(("layer",), spec),)))
        return kv.block_hashes(kv.open(list(range(8)), ("salt",)), 0, 8)

    found = [identities(dtype) for dtype in ("bfloat16", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head")]
    assert len({each for pair in found for each in pair}) == 8
    # activations' own types are as they were before there were others
    assert identities("float32") == found[0]


def test_a_model_that_keeps_nothing_fits_always() -> None:
    kv = KVCacheManager(KVCacheConfig(0))
    blocks = kv.open(list(range(1000)))
    assert kv.find_cached_prefix(blocks, 1000) == kv.empty_prefix()
    assert kv.allocate(blocks, 1000, kv.empty_prefix()) == []
    assert blocks.capacity_tokens >= 1000
    kv.settle(blocks, 1000)
    kv.free(blocks)
    assert (kv.num_blocks, kv.num_free_blocks, kv.usage, kv.shortage(10**9)) == (0, 0, 0.0, None)


@pytest.mark.parametrize("num_tokens", [15, 16, 17])
def test_prefix_is_whole_blocks_and_never_the_last_token(num_tokens: int) -> None:
    kv = make_manager(20, 4)
    token_ids = list(range(num_tokens))
    kv.free(compute(kv, token_ids))
    # The last token has to run again: its logits choose the next one.
    assert num_cached(kv, token_ids) == (num_tokens - 1) // 4 * 4
    assert num_cached(kv, [*token_ids, 99]) == num_tokens // 4 * 4


def test_only_the_common_prefix_is_found_and_only_under_the_same_salt() -> None:
    kv = make_manager(20, 4)
    kv.free(compute(kv, list(range(16)), salt="mine"))
    assert num_cached(kv, [*range(9), 50, 51, 52, 53], salt="mine") == 8
    assert num_cached(kv, [50, *range(1, 16)], salt="mine") == 0
    assert num_cached(kv, list(range(16)), salt="yours") == 0
    assert num_cached(kv, list(range(16))) == 0


def test_blocks_are_found_only_after_they_were_computed() -> None:
    kv = make_manager(20, 4)
    token_ids = list(range(12))
    blocks = kv.open(token_ids, (None,))
    kv.allocate(blocks, 12, kv.find_cached_prefix(blocks, 12))
    assert num_cached(kv, token_ids) == 0
    kv.settle(blocks, 7)
    assert num_cached(kv, token_ids) == 4
    kv.settle(blocks, 12)
    assert num_cached(kv, [*token_ids, 0]) == 12


def test_shared_blocks_are_the_same_blocks_and_stay_until_the_last_one_goes() -> None:
    kv = make_manager(10, 4)
    first = compute(kv, [*range(8), 20])
    second = compute(kv, [*range(8), 30])
    assert first.block_ids[0][:2] == second.block_ids[0][:2]
    assert first.block_ids[0][2] != second.block_ids[0][2]
    assert kv.num_free_blocks == 6
    kv.free(first)
    assert kv.num_free_blocks == 7
    kv.free(second)
    assert kv.num_free_blocks == 10


def test_allocation_counts_cached_blocks_that_would_leave_the_free_list() -> None:
    kv = make_manager(4, 4)
    kv.free(compute(kv, list(range(8))))
    # 2 cached blocks and 3 new ones do not fit into 4, though only 3 are to be drawn and 4 are free.
    token_ids = [*range(8), *range(40, 52)]
    blocks = kv.open(token_ids, (None,))
    prefix = kv.find_cached_prefix(blocks, 20)
    assert prefix.num_tokens == 8
    assert kv.allocate(blocks, 20, prefix) is None
    assert kv.num_free_blocks == 4
    assert kv.allocate(blocks, 16, kv.find_cached_prefix(blocks, 20)) is not None
    assert kv.num_free_blocks == 0


def test_the_tail_is_evicted_before_the_head_and_the_older_request_before_the_younger() -> None:
    kv = make_manager(8, 4)
    older, younger = compute(kv, list(range(16))), compute(kv, list(range(100, 116)))
    kv.free(older)
    kv.free(younger)
    other = kv.open([7] * 8)
    kv.allocate(other, 8)
    assert num_cached(kv, [*range(16), 0]) == 8
    assert num_cached(kv, [*range(100, 116), 0]) == 16


def test_blocks_without_content_worth_keeping_are_taken_first() -> None:
    kv = make_manager(8, 4)
    kv.free(compute(kv, list(range(16))))
    partial = kv.open([1, 2, 3])
    kv.allocate(partial, 3)
    kv.free(partial)
    other = kv.open([7] * 16)
    kv.allocate(other, 16)
    assert num_cached(kv, [*range(16), 0]) == 16


def test_without_caching_nothing_is_found() -> None:
    kv = make_manager(8, 4, enable_prefix_caching=False)
    kv.free(compute(kv, list(range(16))))
    assert num_cached(kv, [*range(16), 0]) == 0
    assert kv.pools[0].num_cached == 0


def test_reset_also_keeps_out_what_was_computed_before_it() -> None:
    kv = make_manager(8, 4)
    token_ids = list(range(6))
    blocks = compute(kv, token_ids)
    kv.reset_prefix_cache()
    token_ids += [6, 7]
    kv.allocate(blocks, 8)
    kv.settle(blocks, 8)
    kv.free(blocks)
    assert num_cached(kv, [*range(8), 0]) == 0
    # Nor does the old second block come back once its head is computed anew.
    kv.free(compute(kv, list(range(4))))
    assert num_cached(kv, [*range(8), 0]) == 4
    # The same request, computed anew, is cached again.
    kv.free(compute(kv, list(range(8))))
    assert num_cached(kv, [*range(8), 0]) == 8


def test_groups_draw_on_one_pool_and_share_no_block() -> None:
    kv = make_manager(12, 4, 8)
    blocks = compute(kv, list(range(16)))
    assert [len(ids) for ids in blocks.block_ids] == [4, 2]
    assert len({block_id for ids in blocks.block_ids for block_id in ids}) == 6
    assert blocks.capacity_tokens == 16
    assert kv.shortage(24) is None
    assert kv.shortage(36) == (9 + 5, 12)
    kv.free(blocks)
    assert kv.num_free_blocks == 12


def test_a_hybrids_hit_after_1000_shared_tokens_recomputes_at_most_a_block() -> None:
    state = MambaSpec(block_size=512, shapes=((8, 8),), dtypes=("float32",))
    full = FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=8, dtype="float32")
    config = KVCacheConfig(200, (KVCacheGroup(("a",), full), KVCacheGroup(("s",), state, 1)), (8,))
    kv = KVCacheManager(config, max_step_tokens=2048)
    shared = [token % 97 for token in range(1000)]
    kv.free(compute(kv, [*shared, 5, 5]))
    other = kv.open([*shared, 6, 7], (None,))
    prefix = kv.find_cached_prefix(other, 1002)
    assert 1000 - prefix.num_tokens <= state.block_size
    assert [group.num_tokens for group in prefix.groups] == [512, 512]
    # one state is held, the checkpoint, and every token's keys and values
    assert [len(group.held) for group in prefix.groups] == [32, 1]


def test_the_listener_hears_what_enters_and_leaves_the_cache() -> None:
    class Listener:
        def __init__(self) -> None:
            self.found: dict[bytes, tuple[bytes | None, list[int]]] = {}

        def block_stored(self, key: bytes, parent: bytes | None, token_ids: list[int]) -> None:
            assert key not in self.found
            assert parent is None or parent in self.found
            self.found[key] = (parent, token_ids)

        def block_removed(self, key: bytes) -> None:
            del self.found[key]

        def cache_cleared(self) -> None:
            self.found.clear()

    listener = Listener()
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    kv = KVCacheManager(KVCacheConfig(4, (KVCacheGroup(("layer",), spec),)), listener=listener)
    blocks = compute(kv, list(range(9)))
    assert [tokens for _, tokens in listener.found.values()] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    kv.free(blocks)
    kv.free(compute(kv, list(range(9))))  # found, so nothing new
    assert len(listener.found) == kv.pools[0].num_cached == 2
    kv.free(compute(kv, [50] * 12))
    assert next(tokens for _, tokens in listener.found.values()) == [0, 1, 2, 3]
    assert len(listener.found) == kv.pools[0].num_cached == 4
    kv.reset_prefix_cache()
    assert not listener.found


def test_an_encoders_tokens_have_their_blocks_from_the_first_step_on() -> None:
    cross = CrossAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    full = FullAttentionSpec(block_size=4, num_kv_heads=1, head_dim=8, dtype="float32")
    kv = KVCacheManager(KVCacheConfig(20, (KVCacheGroup(("a",), full), KVCacheGroup(("x",), cross))))
    assert kv.shortage(12, 30) is None
    assert kv.shortage(52, 30) == (13 + 8, 20)
    token_ids = list(range(12))
    for _ in range(2):  # the second time nothing is found: what an encoder read is no part of the tokens
        blocks = kv.open(token_ids, num_encoder_tokens=30)
        prefix = kv.find_cached_prefix(blocks, 12)
        assert prefix.num_tokens == 0
        added = kv.allocate(blocks, 5, prefix)
        assert added is not None
        assert [len(ids) for ids in added] == [2, 8]
        assert kv.allocate(blocks, 12) == [[blocks.block_ids[0][2]], []]
        assert blocks.capacity_tokens == 12
        kv.settle(blocks, 12)
        kv.free(blocks)
        assert kv.num_free_blocks == 20


@given(
    block_sizes=st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3),
    num_cached_blocks=st.lists(st.integers(0, 6), min_size=3, max_size=3),
    num_tokens=st.integers(1, 26),
)
def test_the_longest_prefix_that_all_groups_hold(
    block_sizes: list[int], num_cached_blocks: list[int], num_tokens: int
) -> None:
    """Against every candidate length, tried one by one."""
    kv = make_manager(60, *block_sizes)
    token_ids = list(range(24))
    blocks = kv.open(token_ids, (None,))
    kv.allocate(blocks, 24)
    num_held = []
    for index, manager in enumerate(kv.managers):
        num = min(num_cached_blocks[index], 24 // manager.block_size)
        group = blocks.groups[index]
        assert group.chain is not None
        manager.cache_blocks(group, group.chain, num)
        num_held.append(num * manager.block_size)
    asked = list(range(num_tokens))
    prefix = kv.find_cached_prefix(kv.open(asked, (None,)), num_tokens)
    candidates = [
        length
        for length in range(num_tokens)
        if all(
            length <= held and length % size == 0 for held, size in zip(num_held, block_sizes, strict=True)
        )
    ]
    assert prefix.num_tokens == max(candidates)
    for index, size in enumerate(block_sizes):
        assert prefix.groups[index].ids == blocks.block_ids[index][: prefix.num_tokens // size]
