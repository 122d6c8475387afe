"""Finds how the experts of qwen3-30b-a3b are launched best, for single tokens, decoding batches and prompts.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/tune_experts.py --out DIR [--seconds 170]
    python3 benchmarks/h200/tune_experts.py --adopt DIR/experts.json

The first measures, in graphs over the weights of several layers, which together exceed the cache. Each of the two
products is tuned with the other one as it is. The second puts what was found into the table that
`inferplane-kernels-cuda` ships.

What is tried follows from the tokens of an expert. Up to 16 the weights are what is waited for: the narrowest tile of
tokens, and as many bytes in flight as shared memory takes. From 256 on it is the products: as large a tile as registers
hold, and stages enough to feed it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import Measuring, adopt, randn

from inferplane_kernels_triton.moe_experts import ExpertsConfig, fused_experts
from inferplane_kernels_triton.moe_one_token import OneTokenConfig
from inferplane_kernels_triton.moe_routing import topk_softmax

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
LAYERS = 4

ONE_TOKEN = [
    OneTokenConfig(rows, columns, warps)
    for rows, columns, warps in (
        (4, 1024, 4), (2, 2048, 4), (1, 2048, 2), (2, 1024, 2), (4, 2048, 8), (8, 512, 4), (1, 2048, 4), (4, 512, 2),
        (2, 2048, 8), (8, 1024, 8),
    )
]  # fmt: skip
ONE_TOKEN_DOWN = [
    OneTokenConfig(rows, columns, warps)
    for rows, columns, warps in (
        (8, 256, 4), (4, 256, 4), (4, 256, 2), (2, 256, 2), (2, 1024, 4), (4, 1024, 4), (8, 256, 8), (1, 1024, 4),
        (16, 256, 8), (2, 256, 1),
    )
]  # fmt: skip
FEW = [
    ExpertsConfig(*each)
    for each in (
        (16, 64, 128, 4, 3), (16, 64, 128, 4, 4), (16, 64, 64, 4, 4), (16, 64, 256, 4, 2), (16, 32, 256, 4, 3),
        (16, 32, 128, 4, 4), (16, 128, 64, 4, 4), (16, 128, 128, 8, 3), (16, 64, 128, 8, 3), (32, 64, 128, 4, 3),
        (16, 32, 128, 2, 4),
    )
]  # fmt: skip
MANY = [
    ExpertsConfig(*each)
    for each in (
        (128, 64, 64, 8, 3), (128, 64, 64, 4, 3), (128, 64, 64, 8, 4), (128, 128, 64, 8, 3), (64, 64, 64, 4, 3),
        (64, 128, 64, 8, 3), (64, 128, 64, 4, 3), (256, 64, 64, 8, 3), (128, 64, 128, 8, 2), (128, 128, 32, 8, 4),
        (64, 64, 64, 4, 4),
    )
]  # fmt: skip
"""tokens, rows, columns, warps and stages of an `ExpertsConfig`"""
GROUPED = {
    32: FEW,
    256: [*FEW[:4], *FEW[6:10], MANY[4], MANY[6]],
    2560: MANY,
    8192: MANY,
}
"""Candidates by the number of tokens: decoding batches, a step of both kinds, and prompts."""


PREFETCH = (0, 2)


class Layers:
    """Some layers' experts, and tokens that were routed at random."""

    def __init__(self, num_tokens: int, weights: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._x = randn(num_tokens, HIDDEN, std=1.0)
        self._routes = topk_softmax(randn(num_tokens, EXPERTS, std=1.0), TOP_K, True)
        self._weights = weights

    def calls(self, **configs: Any) -> list[Callable[[], object]]:
        return [
            partial(fused_experts, self._x, *self._routes, *each, pdl=True, **configs)
            for each in self._weights
        ]


def tune_one_token(measuring: Measuring, layers: Layers) -> None:
    def time(first: OneTokenConfig, second: OneTokenConfig) -> float:
        return measuring.time(f"one token {first} {second}", layers.calls(one_token=(first, second)))

    first = min(ONE_TOKEN, key=lambda each: time(each, OneTokenConfig.for_down()))
    second = min(ONE_TOKEN_DOWN, key=lambda each: time(first, each))
    if time(first, second) < float("inf"):
        key = f"{INNER}x{HIDDEN}"
        measuring.keep("one_token_experts", key, first)
        measuring.keep("one_token_experts_down", key, second)
    measuring.time("one token, sorted", layers.calls(config=ExpertsConfig()))


def tune_grouped(measuring: Measuring, num_tokens: int, layers: Layers) -> None:
    def time(config: ExpertsConfig, down: ExpertsConfig) -> float:
        return measuring.time(
            f"{num_tokens} tokens {config} {down}",
            layers.calls(config=config, down_config=down),
        )

    candidates = GROUPED[num_tokens]
    default = ExpertsConfig.default(num_tokens * TOP_K, EXPERTS, torch.bfloat16)
    config = min(candidates, key=lambda each: time(each, default))
    down = min(candidates, key=lambda each: time(config, each))
    config = min((replace(config, prefetch=each) for each in PREFETCH), key=lambda each: time(each, down))
    down = min((replace(down, prefetch=each) for each in PREFETCH), key=lambda each: time(config, each))
    if time(config, down) < time(default, default) < float("inf"):
        key = f"{num_tokens}x{EXPERTS}x{HIDDEN}x{INNER}"
        measuring.keep("fused_experts", key, config)
        measuring.keep("fused_experts_down", key, down)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("experts-out"))
    parser.add_argument("--seconds", type=float, default=170.0)
    parser.add_argument("--tokens", type=int, nargs="+", choices=(1, *GROUPED), default=[1, *GROUPED])
    parser.add_argument("--adopt", type=Path, help="an experts.json to put into the shipped table")
    args = parser.parse_args()
    if args.adopt:
        adopt(args.adopt)
        return
    measuring = Measuring()
    measuring.start(args.seconds)
    weights = [(randn(EXPERTS, 2 * INNER, HIDDEN), randn(EXPERTS, HIDDEN, INNER)) for _ in range(LAYERS)]
    for num_tokens in args.tokens:
        layers = Layers(num_tokens, weights)
        if num_tokens == 1:
            tune_one_token(measuring, layers)
        else:
            tune_grouped(measuring, num_tokens, layers)
    measuring.write(args.out / "experts.json")


if __name__ == "__main__":
    main()
