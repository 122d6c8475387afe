from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferplane.kvcache.prefix import HASH_BYTES, HashChain, root_hash

tokens = st.lists(st.integers(0, 3), min_size=8, max_size=8)
keys = st.lists(
    st.one_of(st.none(), st.text(max_size=2), st.integers(0, 9), st.binary(max_size=2)), max_size=3
)


@given(one=tokens, other=tokens, one_keys=keys, other_keys=keys, index=st.integers(0, 3))
def test_hashes_agree_exactly_when_prefix_and_keys_do(
    one: list[int], other: list[int], one_keys: list[object], other_keys: list[object], index: int
) -> None:
    is_same = one[: 2 * index + 2] == other[: 2 * index + 2] and repr(one_keys) == repr(other_keys)
    assert (
        HashChain(one, 2, one_keys).hash_of(index) == HashChain(other, 2, other_keys).hash_of(index)
    ) is is_same


def test_keys_are_not_run_together() -> None:
    assert (
        len({root_hash(["ab", "c"]), root_hash(["a", "bc"]), root_hash(["abc"]), root_hash([None, "abc"])})
        == 4
    )


def test_block_size_is_part_of_the_identity_of_what_follows() -> None:
    assert HashChain([1, 2, 3, 4], 2).hash_of(1) != HashChain([1, 2, 3, 4], 4).hash_of(0)


def test_chain_sees_tokens_that_come_later_and_keeps_what_it_has() -> None:
    token_ids = [1, 2]
    chain = HashChain(token_ids, 2)
    first = chain.hash_of(0)
    token_ids += [3, 4]
    assert chain.hash_of(1) == HashChain([1, 2, 3, 4], 2).hash_of(1)
    assert chain.hash_of(0) == first
    assert len(first) == HASH_BYTES


def test_hash_is_the_same_on_every_machine() -> None:
    """Machines that share a cache must agree, so a change of the hash is a change of a format."""
    assert HashChain([1, 2, 3, 4], 4, (None,)).hash_of(0).hex() == "8d20b8da649ef0b88c42f27d07327ae6"
