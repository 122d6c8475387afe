"""Paged attention against a float64 computation over the sequences as they were given, not as they were stored."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inferplane_kernels_cpu import attention_plan
from inferplane_kernels_cpu.attention_plan import KVShape, plan_attention, sees_all
from inferplane_kernels_cpu.paged_attention import Scoring, Scratch, allocate_kv, paged_attention, store_kv

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}


@dataclass
class Case:
    """Sequences with their blocks; NaN in every slot that nothing was written to, and in blocks that nobody sees."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    seq_lens: list[int]
    query_lens: list[int]
    consecutive: bool = False
    seed: int = 0
    first_visible: Callable[[int], int] = sees_all
    soft_cap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        counts = [-(-length // self.block_size) for length in self.seq_lens]
        num_blocks = sum(counts) + 3
        order = (
            torch.arange(num_blocks)
            if self.consecutive
            else torch.randperm(num_blocks, generator=self.generator)
        )
        self.block_table = torch.full((len(counts), max(counts) + 1), int(order[-1]), dtype=torch.int32)
        start = 0
        for index, count in enumerate(counts):
            self.block_table[index, :count] = order[start : start + count]
            start += count
        self.kv = allocate_kv(num_blocks, self.num_kv_heads, self.block_size, self.head_dim, self.dtype)
        self.kv.fill_(math.nan)
        self.keys = [self._randn(length, self.num_kv_heads) for length in self.seq_lens]
        self.values = [self._randn(length, self.num_kv_heads) for length in self.seq_lens]
        self.scale = self.head_dim**-0.5
        self.sinks = torch.randn(self.num_heads, generator=self.generator) if self.has_sinks else None

    def _randn(self, length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, self.head_dim, generator=self.generator).to(self.dtype)

    def slots(self, index: int, start: int, end: int) -> torch.Tensor:
        positions = torch.arange(start, end)
        return (
            self.block_table[index, positions // self.block_size].long() * self.block_size
            + positions % self.block_size
        )

    def run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Writes the past, then runs one step; returns what came out and the float64 truth, by request."""
        pasts = [seq_len - query_len for seq_len, query_len in zip(self.seq_lens, self.query_lens)]
        flat = self.kv.view(2, self.num_kv_heads, -1, self.head_dim)
        for index, past in enumerate(pasts):
            slots = self.slots(index, 0, past)
            flat[0][:, slots] = self.keys[index][:past].transpose(0, 1)
            flat[1][:, slots] = self.values[index][:past].transpose(0, 1)
            gone = self.block_table[index, : self.first_visible(past) // self.block_size].long()
            self.kv[:, :, gone] = math.nan
        queries = [self._randn(length, self.num_heads) for length in self.query_lens]
        new_keys = torch.cat([keys[past:] for keys, past in zip(self.keys, pasts)])
        new_values = torch.cat([values[past:] for values, past in zip(self.values, pasts)])
        slot_mapping = torch.cat([self.slots(i, past, self.seq_lens[i]) for i, past in enumerate(pasts)])
        # q, k and v as slices of one tensor, as they come from a fused projection
        q, k, v = torch.cat([torch.cat(queries), new_keys, new_values], dim=1).split(
            [self.num_heads, self.num_kv_heads, self.num_kv_heads], dim=1
        )
        shape = KVShape.of(self.kv, self.num_heads)
        scoring = Scoring(self.scale, self.soft_cap, self.sinks)
        plan = plan_attention(
            self.query_lens,
            self.seq_lens,
            self.block_table,
            slot_mapping,
            shape,
            self.first_visible,
            scoring.is_plain,
        )
        store_kv(k, v, self.kv, plan)
        scratch = Scratch()
        paged_attention(
            q * 3, k, v, self.kv, plan, scoring, scratch
        )  # an earlier layer leaves no trace in the plan
        out = paged_attention(q, k, v, self.kv, plan, scoring, scratch)
        truth = [self.truth(query, index) for index, query in enumerate(queries)]
        return list(out.split(self.query_lens)), truth

    def truth(self, query: torch.Tensor, index: int) -> torch.Tensor:
        group = self.num_heads // self.num_kv_heads
        keys, values = (x[index].double().repeat_interleave(group, 1) for x in (self.keys, self.values))
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * self.scale
        if self.soft_cap is not None:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        past = len(keys) - len(query)
        for row in range(len(query)):
            scores[:, row, past + row + 1 :] = -math.inf
            scores[:, row, : self.first_visible(past + row)] = -math.inf
        if self.sinks is not None:
            of_sinks = self.sinks.double().view(-1, 1, 1).expand(-1, len(query), 1)
            scores = torch.cat([scores, of_sinks], -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(keys)], values)

    def check(self) -> None:
        for got, want in zip(*self.run()):
            assert got.dtype == self.dtype
            assert (got.double() - want).abs().max().item() <= TOLERANCES[self.dtype] * max(
                1.0, want.abs().max().item()
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (9, 3), (8, 1)])
def test_mixed_step(dtype: torch.dtype, block_size: int, num_heads: int, num_kv_heads: int) -> None:
    Case(
        num_heads,
        num_kv_heads,
        64,
        block_size,
        dtype,
        seq_lens=[1, 17, 300, 128, 128, 70, 5, 129, 33],
        query_lens=[1, 1, 1, 128, 128, 70, 2, 40, 1],
    ).check()


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    Case(6, 2, head_dim, 16, torch.float32, seq_lens=[40, 9, 31], query_lens=[1, 9, 7]).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("consecutive", [True, False])
def test_decoding_alone(dtype: torch.dtype, consecutive: bool) -> None:
    Case(4, 2, 64, 16, dtype, seq_lens=[700], query_lens=[1], consecutive=consecutive).check()


def test_decoding_requests_of_very_different_lengths() -> None:
    lens = [1, 2, 3, 2000, 16, 17, 15, 500, 100, 90, 800, 31, 33, 64]
    Case(4, 2, 32, 16, torch.float32, seq_lens=lens, query_lens=[1] * len(lens)).check()


@pytest.mark.parametrize("consecutive", [True, False])
def test_chunks_of_a_long_prompt(consecutive: bool) -> None:
    """Longer than one query tile, with a past that is no multiple of anything."""
    Case(
        4, 2, 32, 16, torch.float32, seq_lens=[1203, 700], query_lens=[600, 257], consecutive=consecutive
    ).check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_decoding_in_many_chunks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in float32 on a build of torch that cannot sample a product."""
    monkeypatch.setattr(attention_plan, "CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr(attention_plan, "can_sample", lambda: False)
    Case(4, 2, 32, 16, dtype, seq_lens=[60] * 7 + [59] * 6, query_lens=[1] * 13).check()


def test_torch_samples_products() -> None:
    """Without it decoding in float32 still works, at half the speed; the wheels that we know of all have it."""
    assert attention_plan.can_sample()


def window(size: int) -> Callable[[int], int]:
    return lambda position: max(0, position - size + 1)


def chunk(size: int) -> Callable[[int], int]:
    return lambda position: position // size * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("first_visible", [sees_all, window(100), chunk(128)], ids=["all", "window", "chunk"])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_variants(
    dtype: torch.dtype, first_visible: Callable[[int], int], soft_cap: float | None, has_sinks: bool
) -> None:
    """Prompts longer than a window and than a tile, their later parts, and decoding."""
    for consecutive in (True, False):
        Case(
            6,
            2,
            32,
            16,
            dtype,
            seq_lens=[600, 50, 400, 1, 130, 500, 90],
            query_lens=[600, 50, 300, 1, 1, 1, 1],
            consecutive=consecutive,
            first_visible=first_visible,
            soft_cap=soft_cap,
            has_sinks=has_sinks,
        ).check()


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_random_steps(data: st.DataObject) -> None:
    lens = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=12))
    kinds = [data.draw(st.sampled_from(["decode", "whole", "part"])) for _ in lens]
    query_lens = [
        1 if kind == "decode" else length if kind == "whole" else data.draw(st.integers(1, length))
        for kind, length in zip(kinds, lens)
    ]
    kv_heads = data.draw(st.sampled_from([1, 2, 3]))
    Case(
        kv_heads * data.draw(st.sampled_from([1, 2, 5])),
        kv_heads,
        data.draw(st.sampled_from([16, 24, 64])),
        data.draw(st.sampled_from([1, 4, 16, 64])),
        data.draw(st.sampled_from([torch.float32, torch.bfloat16])),
        lens,
        query_lens,
        data.draw(st.booleans()),
        data.draw(st.integers(0, 1000)),
        data.draw(
            st.sampled_from([sees_all, sees_all, window(1), window(19), window(64), chunk(10), chunk(32)])
        ),
        data.draw(st.sampled_from([None, None, 1.5])),
        data.draw(st.booleans()),
    ).check()


def test_a_requests_own_nan_stays_its_own() -> None:
    case = Case(2, 2, 32, 16, torch.float32, seq_lens=[40, 60, 50], query_lens=[1, 1, 1])
    case.keys[1][3] = math.nan
    case.values[1][5] = math.nan
    got, want = case.run()
    assert torch.isnan(got[1]).all()
    for index in (0, 2):
        torch.testing.assert_close(got[index].double(), want[index], rtol=1e-5, atol=1e-5)
