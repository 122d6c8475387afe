"""Where a step of latents is cut, against products that are counted while both ways run."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from attention_steps import ragged_inputs
from inferplane.api.attention import LatentHeads
from inferplane.api.kv import MLAAttentionSpec
from inferplane.api.latents import LEAST_EXPANDED_TOKENS, StepCut

V3 = StepCut(
    MLAAttentionSpec(block_size=16, head_dim=576, rope_dim=64, dtype="bfloat16"),
    LatentHeads(nope_dim=128, value_dim=128),
)
SMALL = StepCut(
    MLAAttentionSpec(block_size=16, head_dim=40, rope_dim=8, dtype="float32"),
    LatentHeads(nope_dim=6, value_dim=10),
)


def counted_products(cut: StepCut, query_len: int, seq_len: int) -> tuple[int, int]:
    """Absorbed and expanded, by one head that multiplies no pair which it must not see."""
    rank, rope, nope, value = cut.spec.latent_rank, cut.spec.rope_dim, cut.heads.nope_dim, cut.heads.value_dim
    to_key, to_value = torch.empty(rank, nope, device="meta"), torch.empty(rank, value, device="meta")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in range(query_len):
            end = seq_len - query_len + row + 1
            rows.append((q[row : row + 1] @ k[:end].T) @ v[:end])
        return torch.cat(rows)

    latents = torch.empty(seq_len, rank + rope, device="meta")
    q = torch.empty(query_len, nope + rope, device="meta")
    with FlopCounterMode(display=False) as absorbed:
        wide = torch.cat([q[:, :nope] @ to_key.T, q[:, nope:]], 1)
        attend(wide, latents, latents[:, :rank]) @ to_value
    with FlopCounterMode(display=False) as expanded:
        keys = torch.cat([latents[:, :rank] @ to_key, latents[:, rank:]], 1)
        attend(q, keys, latents[:, :rank] @ to_value)
    return absorbed.get_total_flops() // 2, expanded.get_total_flops() // 2


@pytest.mark.parametrize("lens", [(1, 1), (7, 7), (1, 30), (20, 30), (5, 90)])
@pytest.mark.parametrize("cut", [V3, SMALL], ids=["V3", "small"])
def test_the_products_saved_are_those_that_are_not_computed(cut: StepCut, lens: tuple[int, int]) -> None:
    absorbed, expanded = counted_products(cut, *lens)
    assert cut.products_saved(*lens) == absorbed - expanded


def test_a_prompt_is_expanded_and_a_token_is_not() -> None:
    assert V3.first_expanded([1, 1, 1], [500, 1, 9]) == 3
    assert V3.first_expanded([1, 2048], [500, 2048]) == 1
    assert V3.first_expanded([4096], [4096]) == 0
    # a chunk behind a long context has to be worth what is made of all of the context
    context = 100_000
    assert V3.first_expanded([150], [context]) == 1
    assert V3.first_expanded([200], [context]) == 0
    assert V3.first_expanded([LEAST_EXPANDED_TOKENS - 1], [LEAST_EXPANDED_TOKENS - 1]) == 1


def test_a_prompt_of_8192_tokens_takes_less_than_two_fifths_of_the_products() -> None:
    absorbed = 8192 * 8193 // 2 * (2 * 512 + 64) + 8192 * 512 * 256
    assert 1 - V3.products_saved(8192, 8192) / absorbed < 0.4


LENS = st.lists(st.tuples(st.integers(1, 80), st.integers(0, 300)), min_size=1, max_size=8)


@settings(deadline=None)
@given(LENS)
def test_no_other_cut_takes_fewer_products(lens: list[tuple[int, int]]) -> None:
    query_lens = [query for query, _ in lens]
    seq_lens = [query + context for query, context in lens]
    cut = SMALL.first_expanded(query_lens, seq_lens)

    def saved(first: int) -> int:
        return sum(SMALL.products_saved(*each) for each in list(zip(query_lens, seq_lens))[first:])

    firsts = range(len(lens))
    allowed = [first for first in firsts if sum(query_lens[first:]) >= LEAST_EXPANDED_TOKENS] + [len(lens)]
    assert cut in allowed
    assert saved(cut) == max(map(saved, allowed))


def test_the_two_parts_are_the_step() -> None:
    contexts, queries = [9, 30, 0, 17], [1, 1, 40, 33]
    inputs = ragged_inputs(contexts, queries, block_size=16, num_blocks=40, device=torch.device("cpu"))
    before, prompts = SMALL(inputs)
    assert prompts is not None
    assert (before.num_reqs, before.num_tokens) == (2, 2)
    assert before.query_lens_host == [1, 1] and before.seq_lens_host == [10, 31]
    for got, want in (
        (before.query_start, [0, 1, 2]),
        (before.seq_lens, [10, 31]),
        (prompts.query_starts, [0, 40, 73]),
        (prompts.key_starts, [0, 40, 90]),
    ):
        assert got.tolist() == want
    assert torch.equal(torch.cat([before.slot_mapping, prompts.slots]), inputs.slot_mapping)
    assert (prompts.num_tokens, prompts.query_lens, prompts.key_lens) == (73, [40, 33], [40, 50])
    first, second = prompts.key_slots.split([40, 50])
    assert torch.equal(first, prompts.slots[:40])
    assert torch.equal(second[17:], prompts.slots[40:])
    assert [slot // 16 for slot in second[:17].tolist()] == [int(inputs.block_table[3, 0])] * 16 + [
        int(inputs.block_table[3, 1])
    ]


def test_a_step_of_single_tokens_is_left_as_it_is() -> None:
    inputs = ragged_inputs([9, 30], [1, 1], block_size=16, num_blocks=20, device=torch.device("cpu"))
    assert V3(inputs) == (inputs, None)
