"""State layers: how a step is cut into segments, how states lie in memory, and the ops that run over them."""

from __future__ import annotations

import math

import torch

from inferplane.api.attention import AttentionInputs
from inferplane.api.kv import MambaSpec
from inferplane.api.ops import OPS
from inferplane.api.state import StateRound, allocate_states, refresh_rounds, state_rounds, state_views


def inputs_of(
    spans: list[tuple[int, int]], table: list[list[int]], block_size: int, for_graph: bool = False
) -> AttentionInputs:
    lens, ends = [end - start for start, end in spans], [end for _, end in spans]
    return AttentionInputs(
        num_reqs=len(spans),
        num_tokens=sum(lens),
        query_lens_host=lens,
        seq_lens_host=ends,
        query_start=torch.tensor([0, *lens]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_size=block_size,
        for_graph=for_graph,
    )


def shown(rounds: tuple[StateRound, ...]) -> list[tuple[list, list, list, list]]:
    return [
        (each.rows.tolist(), each.reads.tolist(), each.writes.tolist(), each.is_first.tolist())
        for each in rounds
    ]


def test_segments_end_where_blocks_are_full_and_wait_for_those_before_them() -> None:
    spans = [(0, 9), (4, 5), (7, 8), (3, 4), (0, 4)]
    table = [[5, 6, 7], [8, 9, 0], [1, 2, 0], [3, 0, 0], [4, 0, 0]]
    #        0-4 4-8 8-9 | 4-5 | 7-8 | 3-4 | 0-4
    assert shown(state_rounds(inputs_of(spans, table, 4))) == [
        ([[9], [10], [11]], [8, 2, 3], [9, 2, 3], [False] * 3),
        ([[0, 1, 2, 3], [12, 13, 14, 15]], [5, 4], [5, 4], [True, True]),
        ([[4, 5, 6, 7]], [5], [6], [False]),
        ([[8]], [6], [7], [False]),
    ]


def test_a_recorded_round_is_what_the_tensors_say_now() -> None:
    table = [[5, 6, 7], [8, 9, 0], [1, 2, 0]]
    recorded = inputs_of([(11, 12)] * 3, table, 4, for_graph=True)
    rounds = state_rounds(recorded)
    spans = [(4, 5), (0, 1), (7, 8)]
    recorded.seq_lens.copy_(torch.tensor([end for _, end in spans]))
    recorded.block_table.copy_(torch.tensor([[2, 3, 0], [4, 0, 0], [5, 6, 0]]))
    refresh_rounds(rounds, recorded)
    assert shown(rounds) == shown(state_rounds(inputs_of(spans, [[2, 3, 0], [4, 0, 0], [5, 6, 0]], 4)))


def test_states_of_several_tensors_lie_in_one_piece_and_do_not_overlap() -> None:
    spec = MambaSpec(block_size=8, shapes=((3, 5), (2, 2)), dtypes=("bfloat16", "float32"))
    assert spec.tensor_bytes == (32, 16)
    memory = allocate_states(spec, 4, torch.device("cpu"))
    assert memory.nbytes == 4 * spec.block_bytes
    first, second = state_views(memory, spec)
    assert (first.shape, first.dtype) == ((4, 3, 5), torch.bfloat16)
    assert (second.shape, second.dtype) == ((4, 2, 2), torch.float32)
    first.fill_(1.5)
    second.fill_(-2.5)
    assert first.eq(1.5).all()
    first[2] = 7.0
    assert second.eq(-2.5).all()
    assert first[[0, 1, 3]].eq(1.5).all()


def test_the_convolution_by_hand() -> None:
    g = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(10, 3, generator=g),
        torch.randn(3, 4, generator=g),
        torch.randn(3, generator=g),
    )
    states = torch.full((4, 3, 3), math.nan)
    outs = []
    for span in [(0, 6), (6, 7), (7, 10)]:
        for each in state_rounds(inputs_of([span], [[2, 0, 3]], 4)):
            out, same = OPS["causal_conv1d"].reference(
                x[each.rows + span[0]], weight, bias, states, each.reads, each.writes, each.is_first
            )
            assert same is states
            outs.append(out)
    got = torch.cat(outs, dim=1)[0]
    for token in range(10):
        for channel in range(3):
            want = float(bias[channel])
            for back in range(4):
                if token - back >= 0:
                    want += float(weight[channel, 3 - back]) * float(x[token - back, channel])
            assert abs(float(got[token, channel]) - want) < 1e-5
    assert torch.equal(states[2], x[1:4].T)  # the checkpoint after four tokens
    assert states[1].isnan().all()


def test_the_scan_by_hand() -> None:
    """Longer than a chunk, in three steps, one token after another in float64."""
    g = torch.Generator().manual_seed(0)
    num_tokens, heads, head_dim, groups, size = 150, 4, 3, 2, 5
    x, steps = (
        torch.randn(num_tokens, heads, head_dim, generator=g),
        torch.rand(num_tokens, heads, generator=g),
    )
    b, c = (torch.randn(num_tokens, groups, size, generator=g) for _ in range(2))
    decay = -torch.rand(heads, generator=g)
    states = torch.full((4, heads, head_dim, size), math.nan)
    outs = []
    for span in [(0, 130), (130, 131), (131, 150)]:
        for each in state_rounds(inputs_of([span], [[3, 1]], 100)):
            rows = each.rows + span[0]
            out, _ = OPS["ssm_scan"].reference(
                x[rows], steps[rows], decay, b[rows], c[rows], states, each.reads, each.writes, each.is_first
            )
            outs.append(out[0])
    state = torch.zeros(heads, head_dim, size, dtype=torch.float64)
    for token in range(num_tokens):
        for head in range(heads):
            step, group = steps[token, head].double(), head // 2
            added = torch.outer(x[token, head].double(), b[token, group].double())
            state[head] = torch.exp(step * decay[head].double()) * state[head] + step * added
            want = state[head] @ c[token, group].double()
            got = torch.cat(outs)[token, head].double()
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        if token == 99:
            torch.testing.assert_close(states[3].double(), state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states[1].double(), state, rtol=1e-4, atol=1e-4)
    assert states[[0, 2]].isnan().all()


def test_the_delta_rule_by_hand() -> None:
    """Longer than a chunk, in three steps, one token after another in float64."""
    g = torch.Generator().manual_seed(0)
    num_tokens, heads, key_heads, key_dim, value_dim = 150, 4, 2, 5, 3
    q, k = (torch.randn(num_tokens, key_heads, key_dim, generator=g) for _ in range(2))
    v = torch.randn(num_tokens, heads, value_dim, generator=g)
    log_decay, beta = (torch.rand(num_tokens, heads, generator=g) for _ in range(2))
    log_decay = -log_decay
    states = torch.full((4, heads, key_dim, value_dim), math.nan)
    outs = []
    for span in [(0, 130), (130, 131), (131, 150)]:
        for each in state_rounds(inputs_of([span], [[3, 1]], 100)):
            rows = each.rows + span[0]
            out, _ = OPS["gated_delta_rule"].reference(
                q[rows], k[rows], v[rows], log_decay[rows], beta[rows], states,
                each.reads, each.writes, each.is_first,
            )  # fmt: skip
            outs.append(out[0])
    state = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64)
    for token in range(num_tokens):
        for head in range(heads):
            query, key = (each[token, head // 2].double() for each in (q, k))
            query, key = query / query.norm() / key_dim**0.5, key / key.norm()
            decayed = state[head] * math.exp(log_decay[token, head])
            missing = v[token, head].double() - key @ decayed
            state[head] = decayed + torch.outer(key, beta[token, head].double() * missing)
            got = torch.cat(outs)[token, head].double()
            torch.testing.assert_close(got, query @ state[head], rtol=1e-4, atol=1e-5)
        if token == 99:
            torch.testing.assert_close(states[3].double(), state, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(states[1].double(), state, rtol=1e-4, atol=1e-5)
    assert states[[0, 2]].isnan().all()
