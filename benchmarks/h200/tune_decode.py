"""Finds how decode attention is launched best, for batches of several sizes.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/tune_decode.py --out DIR [--programs 256 128 …]
    python3 benchmarks/h200/tune_decode.py --adopt DIR/decode.json

The first measures, in graphs over caches that together exceed the second-level one, each launch behind the norm and the
rotation of its layer, during which it may start. A graph has to be right for sequences of any length, so that what
counts is the mean over `LENGTHS`, relative to reading the keys and values at the card's rate. The second command puts
what was found into the table that `inferplane-kernels-cuda` ships.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn
from precompile import meta, precompile
from timing import num_buffers

from inferplane_kernels_triton.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    choose_num_splits,
    decode_attention,
)
from inferplane_kernels_triton.rope_and_store import rope_and_store

HEADS, HEAD_DIM, BLOCK_SIZE = 32, 128, 16
KV_HEADS = {256: 8, 128: 4, 2048: 8, 8: 8, 4: 4, 64: 8, 1024: 4}
"""By requests times KV heads: llama-8b has 8 of them and qwen3-30b-a3b 4, with 1, 8, 32 and 256 requests."""
LENGTHS = (192, 640, 2048)
LONGEST = 8192
"""What a graph's splits are chosen for."""
CONFIGS = [
    (64, 4, 3), (128, 4, 3), (64, 4, 2), (32, 4, 4), (128, 4, 2), (64, 8, 3), (128, 8, 3), (32, 2, 4),
]  # fmt: skip
"""keys, warps and stages of a `DecodeConfig`"""
PREFETCH = (32, 64)
"""Instead of the default, with the configuration that is best with it."""


def candidates(programs: int) -> list[DecodeConfig]:
    """With as many programs to a processor as make a difference."""
    found: dict[tuple[object, ...], DecodeConfig] = {}
    for each, many in itertools.product(CONFIGS, (1, 2, 4)):
        config = DecodeConfig(*each, programs_per_processor=many)
        found.setdefault((each, num_splits(programs, config)), config)
    return list(found.values())


def num_splits(programs: int, config: DecodeConfig) -> int:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    kv_heads = KV_HEADS[programs]
    return choose_num_splits(
        programs // kv_heads, kv_heads, LONGEST, processors * config.programs_per_processor
    )


def launch(task: tuple[int, int, DecodeConfig]) -> None:
    """Requests times KV heads, splits, and the configuration."""
    programs, splits, config = task
    kv_heads = KV_HEADS[programs]
    num_reqs = programs // kv_heads
    kv = meta(2, 64, BLOCK_SIZE, kv_heads, HEAD_DIM)
    index = partial(meta, dtype=torch.int32)
    decode_attention(
        meta(num_reqs, HEADS, HEAD_DIM), kv[0], kv[1], index(num_reqs, 64), index(num_reqs), 0.088, num_splits=splits,
        workspace=DecodeWorkspace.allocate(num_reqs, HEADS, kv_heads, HEAD_DIM, splits, kv.device), config=config,
        pdl=True,
    )  # fmt: skip


class Layers:
    """Some layers' caches of sequences of one length, with blocks in random order."""

    def __init__(self, programs: int, length: int, block_size: int = BLOCK_SIZE) -> None:
        self._kv_heads = KV_HEADS[programs]
        self._num_reqs = num_reqs = programs // self._kv_heads
        blocks = -(-length // block_size)
        size = 2 * num_reqs * blocks * block_size * self._kv_heads * HEAD_DIM
        self._caches = [
            randn(2, num_reqs * blocks, block_size, self._kv_heads, HEAD_DIM)
            for _ in range(num_buffers(2 * size))
        ]
        table = torch.randperm(num_reqs * blocks, device="cuda").int().view(num_reqs, blocks)
        self._table = torch.zeros((num_reqs, LONGEST // block_size), dtype=torch.int32, device="cuda")
        self._table[:, :blocks] = table
        self._lengths = torch.full((num_reqs,), length, dtype=torch.int32, device="cuda")
        self._positions = self._lengths.long() - 1
        self._slots = table[:, -1].long() * block_size + (length - 1) % block_size
        self._qkv = randn(num_reqs, (HEADS + 2 * self._kv_heads) * HEAD_DIM)
        self._angles = randn(LONGEST, HEAD_DIM).float()
        self._out = randn(num_reqs, HEADS, HEAD_DIM)

    def calls(self, splits: int, config: DecodeConfig) -> list[Callable[[], object]]:
        device = self._out.device
        space = DecodeWorkspace.allocate(self._num_reqs, HEADS, self._kv_heads, HEAD_DIM, splits, device)
        return [partial(self._attend, kv, splits, space, config) for kv in self._caches]

    def _attend(
        self, kv: torch.Tensor, splits: int, space: DecodeWorkspace, config: DecodeConfig
    ) -> torch.Tensor:
        q = rope_and_store(
            self._qkv, kv[0], kv[1], self._slots, self._positions, self._angles, HEADS, pdl=True
        )
        return decode_attention(
            q, kv[0], kv[1], self._table, self._lengths, 0.088, num_splits=splits, workspace=space, out=self._out,
            config=config, pdl=True,
        )  # fmt: skip


def tune(measuring: Measuring, programs: int) -> None:
    batches = {length: Layers(programs, length) for length in LENGTHS}

    def time(config: DecodeConfig) -> float:
        """The geometric mean over the lengths; infinite where one fails."""
        splits = num_splits(programs, config)
        logs = [
            math.log(
                measuring.time(
                    f"{programs} programs, {length} keys, {splits} splits {config}",
                    batch.calls(splits, config),
                )
            )
            for length, batch in batches.items()
        ]
        return sum(logs)

    times = {config: time(config) for config in candidates(programs)}
    best = min(times, key=times.__getitem__)
    for keys in PREFETCH:
        config = DecodeConfig(**{**vars(best), "prefetch": keys})
        times[config] = time(config)
    best = min(times, key=times.__getitem__)
    if times[best] < float("inf"):
        print(f"BEST {programs} programs: {best}, {num_splits(programs, best)} splits", flush=True)
        measuring.keep("decode_attention", f"{programs}x1024", best)
        small = Layers(programs, LENGTHS[0], 16).calls(num_splits(programs, best), best)
        measuring.time(f"{programs} programs, {LENGTHS[0]} keys in blocks of 16", small)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("decode-out"))
    parser.add_argument("--programs", type=int, nargs="+", choices=KV_HEADS, default=[256, 128, 2048, 8])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--adopt", type=Path, help="a decode.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    tasks = [
        (programs, num_splits(programs, config), config)
        for programs in args.programs
        for config in candidates(programs)
    ]
    precompile(launch, tasks)
    measuring = Measuring()
    measuring.start(args.seconds)
    for programs in args.programs:
        tune(measuring, programs)
        torch.cuda.empty_cache()
        measuring.write(args.out / "decode.json")


if __name__ == "__main__":
    main()
