"""Microseconds of one layer's paged attention on the CPU, beside the time to read its keys and values once.

    python benchmarks/cpu_attention.py [--dtype float32] [--threads 2] [--heads 9 --kv-heads 3 --head-dim 64] [--json]

Each case rotates over enough layers that none finds its keys and values in cache. The limit is a plain sum over as
many bytes, measured alongside; for prompts it is the matrix products' time at the machine's measured rate.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from inferplane_kernels_cpu.attention_plan import AttentionPlan, KVShape, plan_attention
from inferplane_kernels_cpu.paged_attention import Scoring, Scratch, allocate_kv, paged_attention, store_kv

COLD_BYTES = 256 << 20
"""More than any cache holds."""


@dataclass(frozen=True)
class Case:
    name: str
    query_lens: list[int]
    seq_lens: list[int]


def cases() -> list[Case]:
    def decode(batch: int, length: int) -> Case:
        return Case(f"decode_{batch}x{length}", [1] * batch, [length] * batch)

    ragged = [100 + i * 769 % 1901 for i in range(64)]
    chunk = Case("chunk_512_of_2048", [512], [2048])
    return [
        *(decode(1, length) for length in (128, 1024, 4096)),
        *(decode(64, length) for length in (160, 1024)),
        decode(256, 256),
        Case("decode_64_ragged", [1] * 64, ragged),
        *(
            Case(f"prefill_{n}x{length}", [length] * n, [length] * n)
            for n, length in ((16, 128), (4, 512), (1, 2048))
        ),
        Case("prefill_ragged", lens := [40, 333, 128, 700, 90, 257, 500], lens),
        chunk,
        Case("mixed_48_decode_1x1024", [1] * 48 + [1024], [300] * 48 + [1024]),
    ]


class Layers:
    """The KV of as many layers as it takes to be cold, with random blocks."""

    def __init__(self, case: Case, args: argparse.Namespace) -> None:
        dtype = getattr(torch, args.dtype)
        counts = [-(-length // args.block_size) for length in case.seq_lens]
        num_blocks = sum(counts) + 8
        order = torch.randperm(num_blocks)
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        start = 0
        for row, count in enumerate(counts):
            table[row, :count] = order[start : start + count]
            start += count
        slots = []
        for row, (query_len, seq_len) in enumerate(zip(case.query_lens, case.seq_lens)):
            positions = torch.arange(seq_len - query_len, seq_len)
            slots.append(
                table[row, positions // args.block_size].long() * args.block_size
                + positions % args.block_size
            )
        first = allocate_kv(num_blocks, args.kv_heads, args.block_size, args.head_dim, dtype).normal_()
        num_layers = max(2, min(30, COLD_BYTES // first.nbytes))
        self.kvs = [first] + [first.clone() for _ in range(num_layers - 1)]
        num_tokens, heads = sum(case.query_lens), args.heads + 2 * args.kv_heads
        qkv = torch.randn(num_tokens, heads, args.head_dim).to(dtype)
        self.q, self.k, self.v = qkv.split([args.heads, args.kv_heads, args.kv_heads], dim=1)
        self._plan_args = (
            case.query_lens,
            case.seq_lens,
            table,
            torch.cat(slots),
            KVShape.of(first, args.heads),
        )
        self._scoring = Scoring(args.head_dim**-0.5)
        self._scratch = Scratch()
        self.plan = self.make_plan()

    def make_plan(self) -> AttentionPlan:
        return plan_attention(*self._plan_args)

    def run(self, turn: int) -> None:
        kv = self.kvs[turn % len(self.kvs)]
        store_kv(self.k, self.v, kv, self.plan)
        paged_attention(self.q, self.k, self.v, kv, self.plan, self._scoring, self._scratch)


def best_us(call: Callable[[int], object], min_turns: int = 8, seconds: float = 1.0) -> float:
    """The quickest of a second's turns: on a shared machine the others only ever add."""
    best, turn, until = float("inf"), 0, time.perf_counter() + seconds
    call(0)
    while turn < min_turns or time.perf_counter() < until:
        start = time.perf_counter()
        call(turn)
        best = min(best, time.perf_counter() - start)
        turn += 1
    return best * 1e6


def limit_us(case: Case, layers: Layers, args: argparse.Namespace, gflops: float) -> float:
    token_bytes = 2 * args.kv_heads * args.head_dim * layers.kvs[0].element_size()
    stored = sum(seq for query, seq in zip(case.query_lens, case.seq_lens) if query < seq)
    num_floats = max(1, stored * token_bytes // 4)
    flat = [kv.view(-1).view(torch.float32)[:num_floats] for kv in layers.kvs]
    read = best_us(lambda turn: flat[turn % len(flat)].sum(), seconds=0.3)
    pairs = sum(
        query * (2 * seq - query + 1) / 2 for query, seq in zip(case.query_lens, case.seq_lens) if query > 1
    )
    return read + 4 * pairs * args.heads * args.head_dim / gflops / 1e3


def measured_gflops() -> float:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return 2 * 1024**3 / best_us(lambda turn: a @ b) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gflops = measured_gflops()
    with torch.inference_mode():
        for case in cases():
            if not case.name.startswith(args.only):
                continue
            layers = Layers(case, args)
            row = {
                "case": case.name,
                "dtype": args.dtype,
                "layer_us": round(best_us(layers.run), 1),
                "limit_us": round(limit_us(case, layers, args, gflops), 1),
                "plan_us": round(best_us(lambda turn, layers=layers: layers.make_plan(), seconds=0.2), 1),
            }
            row["share_of_limit"] = round(row["limit_us"] / row["layer_us"], 2)
            text = json.dumps(row) if args.json else "  ".join(f"{key} {value}" for key, value in row.items())
            print(text, flush=True)


if __name__ == "__main__":
    main()
