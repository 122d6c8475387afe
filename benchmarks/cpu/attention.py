"""Paged attention of a layer against what the machine can do at most and against torch's, measured in turn in one run.

    python benchmarks/cpu/attention.py [--dtype bfloat16] [--threads 2] [--repeats 15] [--only decode] [--out FILE]

Steps of single tokens are shown as GB/s of stored keys and values, and as a share of reading as many bytes alone;
prompts as GFLOP/s of what is not masked, and as a share of the peak of products in registers. Each case walks over so
many layers that none finds its keys and values in a core's own cache. Figures are the quickest of the repeats, in each
of which everything has its turn: on a shared machine the others only ever add.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from kernels import PEAK_ROUNDS

from inferplane_kernels_cpu import native, paged_attention
from inferplane_kernels_cpu.attention_plan import KVShape, plan_attention
from inferplane_kernels_cpu.native import int64, pointer
from inferplane_kernels_cpu.native_attention import LayerShape, PagedAttention, Step, allocate_kv
from inferplane_kernels_cpu.ops import rotary

COLD_BYTES = 256 << 20
"""Keys and values that one measurement walks over."""
BLOCK_SIZE = 32
MODELS = {"SmolLM2-135M": (9, 3, 64), "llama-1b": (32, 8, 64), "llama-8b": (32, 8, 128)}
"""Query heads, KV heads, and the size of a head."""


@dataclass(frozen=True)
class Case:
    name: str
    query_lens: list[int]
    seq_lens: list[int]

    @property
    def is_decode(self) -> bool:
        return max(self.query_lens) == 1

    @property
    def num_pairs(self) -> float:
        """Of a query and a key that it sees."""
        return sum(n * (2 * length - n + 1) / 2 for n, length in zip(self.query_lens, self.seq_lens))


CASES = [
    Case("decode 1 × 8192", [1], [8192]),
    Case("decode 1 × 500", [1], [500]),
    Case("decode 32 × 512", [1] * 32, [512] * 32),
    Case("decode 64 × 160", [1] * 64, [160] * 64),
    Case("prompt 2000", [2000], [2000]),
    Case("prompts 8 × 128", [128] * 8, [128] * 8),
    Case("prompt 512 of 2048", [512], [2048]),
]


class Layers:
    """The same step over many layers' keys and values, in random blocks, by both implementations."""

    def __init__(self, case: Case, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
        self._num_heads, self._num_kv_heads, self._head_dim = heads
        counts = [-(-length // BLOCK_SIZE) for length in case.seq_lens]
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, blocks in zip(table, torch.randperm(sum(counts)).int().split(counts)):
            row[: len(blocks)] = blocks
        positions = [torch.arange(end - n, end) for n, end in zip(case.query_lens, case.seq_lens)]
        slots = torch.cat(
            [row[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE for row, at in zip(table, positions)]
        )
        self._positions = torch.cat(positions)
        angles = torch.randn(max(case.seq_lens), self._head_dim // 2)
        self._cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1)
        self._qkv = torch.randn(len(slots), (heads[0] + 2 * heads[1]) * heads[2]).to(dtype)
        shape = (sum(counts), heads[1], BLOCK_SIZE, heads[2], dtype)
        size = allocate_kv(*shape).nbytes
        self._kvs = [allocate_kv(*shape).normal_() for _ in range(max(2, min(30, COLD_BYTES // size)))]
        self._scale = heads[2] ** -0.5
        starts = torch.tensor([0, *case.query_lens]).cumsum(0).int()
        self._step = Step(table, torch.tensor(case.seq_lens, dtype=torch.int32), starts, slots)
        layer = LayerShape(*heads, BLOCK_SIZE, 0, 0, self._scale, 0.0)
        self._native = PagedAttention(layer, dtype)
        shapes = KVShape.of(self._torch_kv(self._kvs[0]), heads[0])
        self._plan = plan_attention(case.query_lens, case.seq_lens, table, slots, shapes)
        self._scratch = paged_attention.Scratch()
        self.stored_bytes = sum(case.seq_lens) * 2 * heads[1] * heads[2] * dtype.itemsize
        self._read = native.kernel("read_memory", pointer, int64)

    def _torch_kv(self, kv: torch.Tensor) -> torch.Tensor:
        return kv.view(2, self._num_kv_heads, -1, BLOCK_SIZE, self._head_dim)

    def ours(self, turn: int) -> None:
        kv = self._kvs[turn % len(self._kvs)]
        self._native.rotate_and_attend(self._qkv, self._positions, self._cos_sin, kv, self._step)

    def torchs(self, turn: int) -> None:
        kv = self._torch_kv(self._kvs[turn % len(self._kvs)])
        split = (self._num_heads, self._num_kv_heads, self._num_kv_heads)
        q, k, v = self._qkv.view(-1, sum(split), self._head_dim).split_with_sizes(split, 1)
        q, k = rotary(q, k, self._positions, self._cos_sin)
        paged_attention.store_kv(k, v, kv, self._plan)
        scoring = paged_attention.Scoring(self._scale)
        paged_attention.paged_attention(q, k, v, kv, self._plan, scoring, self._scratch)

    def read(self, turn: int) -> None:
        kv = self._kvs[turn % len(self._kvs)]
        self._read(kv.data_ptr(), min(self.stored_bytes, kv.nbytes) // 256 * 256)


def seconds(call: Callable[[int], object], turn: int) -> float:
    start = time.perf_counter()
    call(turn)
    return time.perf_counter() - start


def measure(model: str, case: Case, dtype: torch.dtype, repeats: int) -> dict[str, object]:
    layers = Layers(case, MODELS[model], dtype)
    spin = native.kernel("multiply_registers", int64, int64, returns=native.ctypes.c_double)
    times: dict[str, list[float]] = {"ours": [], "torch": [], "read": [], "peak": []}
    layers.ours(0), layers.torchs(0)
    for turn in range(repeats):
        times["ours"].append(seconds(layers.ours, turn))
        times["read"].append(seconds(layers.read, turn + 1))
        times["torch"].append(seconds(layers.torchs, turn + 2))
        start = time.perf_counter()
        done = spin(64, PEAK_ROUNDS)
        times["peak"].append((time.perf_counter() - start) / done)
    ours, torchs, read, per_operation = (min(times[key]) for key in times)
    num_heads, _, head_dim = MODELS[model]
    operations = 4 * case.num_pairs * num_heads * head_dim
    row: dict[str, object] = {
        "model": model,
        "case": case.name,
        "us": round(ours * 1e6, 1),
        "torch_us": round(torchs * 1e6, 1),
        "times_torch": round(torchs / ours, 2),
    }
    if case.is_decode:
        row |= {
            "GBps": round(layers.stored_bytes / ours / 1e9, 2),
            "read_GBps": round(layers.stored_bytes / read / 1e9, 2),
            "of_read": round(read / ours, 3),
        }
    else:
        row |= {
            "GFLOPs": round(operations / ours / 1e9, 1),
            "peak_GFLOPs": round(1 / per_operation / 1e9, 1),
            "of_peak": round(operations * per_operation / ours, 3),
        }
    return row


def rows(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    facts = {"level": native.level(), "threads": args.threads, "dtype": args.dtype}
    for model in args.models:
        for case in CASES:
            if case.name.startswith(args.only):
                yield facts | measure(model, case, getattr(torch, args.dtype), args.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=native.num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--out", type=Path, default=None, help="file to append a JSON object a line to")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    with torch.inference_mode():
        for row in rows(args):
            print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
