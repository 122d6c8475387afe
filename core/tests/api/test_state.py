"""State layers: how a step is cut into segments, how states lie in memory, and the ops that run over them."""

from __future__ import annotations

import math

import torch

from inferplane.api.attention import AttentionInputs
from inferplane.api.kv import MambaSpec
from inferplane.api.ops import OPS
from inferplane.api.state import StateSegments, allocate_states, state_segments, state_views


def segments_of(spans: list[tuple[int, int]], table: list[list[int]], block_size: int) -> StateSegments:
    lens, ends = [end - start for start, end in spans], [end for _, end in spans]
    inputs = AttentionInputs(
        num_reqs=len(spans),
        num_tokens=sum(lens),
        query_lens_host=lens,
        seq_lens_host=ends,
        query_start=torch.tensor([0, *lens]).cumsum(0).int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_table=torch.tensor(table, dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        block_size=block_size,
    )
    return state_segments(inputs)


def test_segments_end_where_blocks_are_full() -> None:
    spans = [(0, 9), (4, 5), (7, 8), (3, 4)]
    segments = segments_of(spans, [[5, 6, 7], [8, 9, 0], [1, 2, 0], [3, 0, 0]], 4)
    #                 0-4 4-8 8-9 | 4-5 | 7-8 | 3-4
    assert segments.starts.tolist() == [0, 4, 8, 9, 10, 11, 12]
    assert segments.reads.tolist() == [5, 5, 6, 8, 2, 3]
    assert segments.writes.tolist() == [5, 6, 7, 9, 2, 3]
    assert segments.is_first.tolist() == [True, False, False, False, False, False]


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
    for start, end in [(0, 6), (6, 7), (7, 10)]:
        about = segments_of([(start, end)], [[2, 0, 3]], 4)
        out, same = OPS["causal_conv1d"].reference(
            x[start:end], weight, bias, states, about.starts, about.reads, about.writes, about.is_first
        )
        assert same is states
        outs.append(out)
    got = torch.cat(outs)
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
    for start, end in [(0, 130), (130, 131), (131, 150)]:
        about = segments_of([(start, end)], [[3, 1]], 100)
        out, _ = OPS["ssm_scan"].reference(
            x[start:end], steps[start:end], decay, b[start:end], c[start:end], states,
            about.starts, about.reads, about.writes, about.is_first,
        )  # fmt: skip
        outs.append(out)
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
