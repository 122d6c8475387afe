from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferplane.api.comm import Communicator
from inferplane.config import ConfigError
from inferplane.layers.parallel import even_share, kv_head_share, padded_share, whole
from model_harness import ThreadCommunicator

SIZES = st.integers(1, 10_000)
RANKS = st.integers(1, 16)


def _ranks(world_size: int) -> list[Communicator]:
    return [ThreadCommunicator(rank, [None] * world_size, None) for rank in range(world_size)]  # type: ignore[arg-type]


@given(size=SIZES, world_size=RANKS)
def test_even_shares_cover_everything_once_in_rank_order(size: int, world_size: int):
    total = size * world_size
    elements = [
        index for comm in _ranks(world_size) for index in range(total)[even_share(total, comm, "n").span]
    ]
    assert elements == list(range(total))


@given(total=SIZES, world_size=RANKS)
def test_even_shares_of_what_does_not_divide_are_refused(total: int, world_size: int):
    if total % world_size == 0:
        return
    with pytest.raises(ConfigError, match=f"x {total} cannot be split over {world_size} ranks"):
        even_share(total, _ranks(world_size)[0], "x")


@given(total=SIZES, world_size=RANKS)
def test_padded_shares_have_equal_room_and_cover_everything_once(total: int, world_size: int):
    shares = [padded_share(total, comm) for comm in _ranks(world_size)]
    [room] = {size for _, size in shares}
    assert room * (world_size - 1) < total + world_size * world_size
    assert all(0 <= share.size <= room for share, _ in shares)
    # a token's rank and row follow from its id
    where = [(rank, index) for rank, (share, _) in enumerate(shares) for index in range(total)[share.span]]
    assert where == [(index // room, index) for index in range(total)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads"), [(32, 8), (32, 32), (6, 1), (12, 3), (16, 2), (48, 4)]
)
@given(world_size=RANKS)
def test_each_query_head_meets_its_kv_head(num_heads: int, num_kv_heads: int, world_size: int):
    if num_heads % world_size:
        return
    for comm in _ranks(world_size):
        try:
            kv = kv_head_share(num_kv_heads, comm, "KV heads")
        except ConfigError:
            assert num_kv_heads % world_size and world_size % num_kv_heads
            continue
        queries = even_share(num_heads, comm, "heads")
        per_kv = queries.size // kv.size
        for local, head in enumerate(range(num_heads)[queries.span]):
            assert kv.start + local // per_kv == head // (num_heads // num_kv_heads)


def test_shares_scale_from_heads_to_features():
    comm = _ranks(4)[3]
    assert even_share(8, comm, "heads").scaled(64).span == slice(6 * 64, 8 * 64)
    assert whole(5).span == slice(0, 5)
