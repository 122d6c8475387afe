"""Times each Triton kernel at its main shapes and says what share of the card's own limit it reaches.

    python3 benchmarks/h200/checkout.py -- python3 benchmarks/h200/kernels.py --out DIR [--stage matvec …]

A stage that exceeds its time stops early; a kernel or a configuration that fails is printed and left out. DIR gets
``kernels.jsonl``, one object a measurement, and ``tuning.json``, the fastest configuration by kernel and shape.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from timing import measured_limits, num_buffers, seconds_per_call

from inferplane.api.draw_op import DrawHints
from inferplane.api.draw_op import draw_token as reference_draw
from inferplane_kernels_triton.activation import silu_and_mul
from inferplane_kernels_triton.decode_attention import (
    DecodeConfig,
    DecodeWorkspace,
    choose_num_splits,
    decode_attention,
)
from inferplane_kernels_triton.draw_token import draw_token
from inferplane_kernels_triton.matvec import MatvecConfig, NormBefore, matvec
from inferplane_kernels_triton.moe_experts import fused_experts
from inferplane_kernels_triton.moe_routing import topk_softmax
from inferplane_kernels_triton.norm import add_rms_norm
from inferplane_kernels_triton.prefill_attention import PrefillConfig, prefill_attention
from inferplane_kernels_triton.rope_and_store import rope_and_store
from inferplane_kernels_triton.skinny_matmul import MatmulConfig, MatmulWorkspace, skinny_matmul

BF16 = torch.bfloat16
HIDDEN, INTER, QKV, VOCAB, LAYERS = 4096, 14336, 6144, 128256, 32
"""llama-8b."""
WEIGHTS = {
    "qkv": (QKV, HIDDEN),
    "o": (HIDDEN, HIDDEN),
    "gate_up": (2 * INTER, HIDDEN),
    "down": (HIDDEN, INTER),
    "lm_head": (VOCAB, HIDDEN),
}


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda").normal_(std=0.05)


class Report:
    """Prints and keeps what was measured; knows the limits and the time that a stage has left."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds, self.end = folder, seconds, 0.0
        self.read, self.flops = measured_limits()
        self.tuning: dict[str, dict[str, Any]] = {}
        self.lines: list[dict[str, Any]] = []
        print(f"limits: read {self.read / 1e12:.2f} TB/s, bf16 {self.flops / 1e12:.0f} TFLOP/s", flush=True)

    def start(self) -> None:
        self.end = time.monotonic() + self.seconds

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self.end

    def measure(
        self,
        kernel: str,
        shape: str,
        calls: list[Callable[[], object]],
        num_bytes: float,
        flops: float = 0.0,
        **more,
    ) -> float:
        """Seconds of one call; infinite where it fails."""
        try:
            seconds = seconds_per_call(calls)
        except Exception as error:
            print(f"{kernel} {shape} {more} FAILED {type(error).__name__}: {str(error)[:200]}", flush=True)
            return float("inf")
        limit = max(num_bytes / self.read, flops / self.flops)
        line = {
            "kernel": kernel,
            "shape": shape,
            "us": round(seconds * 1e6, 2),
            "share": round(limit / seconds, 3),
        }
        line |= {
            "TB/s": round(num_bytes / seconds / 1e12, 2),
            "TFLOP/s": round(flops / seconds / 1e12, 1),
            **more,
        }
        self.lines.append(line)
        print(json.dumps(line), flush=True)
        return seconds

    def best(self, kernel: str, shape: str, timed: dict[Any, float]) -> Any:
        """Keeps the fastest configuration in the tuning table and returns it; None if all failed."""
        config = min(timed, key=timed.__getitem__, default=None)
        if config is None or timed[config] == float("inf"):
            return None
        self.tuning.setdefault(kernel, {})[shape] = dataclasses.asdict(config)
        print(f"BEST {kernel} {shape} {timed[config] * 1e6:.2f} us {config}", flush=True)
        return config

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        capability = "".join(map(str, torch.cuda.get_device_capability()))
        card = {
            "card": torch.cuda.get_device_name(),
            "read_TB/s": self.read / 1e12,
            "TFLOP/s": self.flops / 1e12,
        }
        (self.folder / "kernels.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in [card, *self.lines])
        )
        table = {"capability": capability, "kernels": self.tuning}
        (self.folder / "tuning.json").write_text(json.dumps(table, indent=1) + "\n")


def matvec_configs() -> Iterator[MatvecConfig]:
    """The likely ones first, because a stage may run out of time."""
    for rows, columns, warps, unroll in (
        (4, 1024, 4, 2), (2, 2048, 4, 2), (4, 2048, 8, 2), (8, 512, 4, 2), (1, 4096, 4, 1), (2, 1024, 2, 4),
        (4, 1024, 4, 4), (4, 512, 2, 4), (8, 1024, 4, 1), (2, 2048, 8, 2), (1, 2048, 4, 2), (16, 512, 8, 2),
        (8, 1024, 8, 2), (2, 4096, 8, 1), (4, 1024, 4, 1), (4, 512, 4, 4),
    ):  # fmt: skip
        yield MatvecConfig(rows, columns, warps, unroll)


def stage_matvec(report: Report) -> None:
    """Plain products of one row: the fastest configuration by shape, and cuBLAS beside it."""
    for out, inner in WEIGHTS.values():
        num_bytes = 2 * out * inner
        weights = [randn(out, inner) for _ in range(min(8, num_buffers(num_bytes)))]
        x, y = randn(1, inner), torch.empty(1, out, dtype=BF16, device="cuda")
        shape = f"{out}x{inner}"
        report.measure("cublas", shape, [partial(torch.mm, x, w.t(), out=y) for w in weights], num_bytes)
        timed: dict[MatvecConfig, float] = {}
        for config in matvec_configs():
            if report.in_time:
                calls = [partial(matvec, x, w, out=y, config=config) for w in weights]
                timed[config] = report.measure("matvec", shape, calls, num_bytes, config=str(config))
        best = report.best("matvec", shape, timed)
        if best:
            calls = [partial(matvec, x, w, out=y, config=best, pdl=True) for w in weights]
            report.measure("matvec+pdl", shape, calls, num_bytes, config=str(best))
        del weights


def stage_gated(report: Report) -> None:
    """The product with norm and residual before it and the gate after it."""
    out, inner = WEIGHTS["gate_up"]
    weights = [randn(out, inner) for _ in range(4)]
    x, residual, residual_out, norm_weight = (randn(1, inner) for _ in range(4))
    norm = NormBefore(norm_weight[0], 1e-5, residual, residual_out)
    y = torch.empty(1, out // 2, dtype=BF16, device="cuda")
    timed: dict[MatvecConfig, float] = {}
    for config in itertools.islice(matvec_configs(), 12):
        if report.in_time:
            calls = [
                lambda w=w, c=config: matvec(x, w, norm=norm, gated=True, out=y, config=c) for w in weights
            ]
            timed[config] = report.measure(
                "matvec_gated", f"{out}x{inner}", calls, 2 * out * inner, config=str(config)
            )
    report.best("matvec_gated", f"{out}x{inner}", timed)


def matmul_configs(inner: int) -> Iterator[MatmulConfig]:
    for rows, columns, splits, warps, stages in (
        (64, 128, 1, 4, 4), (64, 128, 4, 4, 4), (64, 256, 1, 4, 3), (64, 256, 4, 4, 3), (128, 128, 1, 4, 3),
        (128, 128, 4, 4, 3), (32, 256, 1, 4, 4), (64, 128, 2, 4, 5), (128, 64, 8, 4, 5), (64, 128, 8, 4, 3),
        (32, 256, 4, 4, 3), (32, 512, 1, 4, 3), (128, 64, 2, 8, 5), (16, 512, 1, 4, 4),
    ):  # fmt: skip
        if splits * columns <= inner:
            yield MatmulConfig(rows, columns, splits, warps, stages)


def stage_matmul(report: Report) -> None:
    """Products of a few rows: the fastest configuration by shape and number of tokens, and cuBLAS beside it."""
    for tokens, name in itertools.product((32, 8, 2, 16, 64), ("o", "qkv", "down", "gate_up")):
        out, inner = WEIGHTS[name]
        num_bytes, flops = 2 * out * inner, 2 * tokens * out * inner
        weights = [randn(out, inner) for _ in range(min(8, num_buffers(num_bytes)))]
        x, y = randn(tokens, inner), torch.empty(tokens, out, dtype=BF16, device="cuda")
        shape = f"{tokens}x{out}x{inner}"
        calls = [partial(torch.mm, x, w.t(), out=y) for w in weights]
        report.measure("cublas", shape, calls, num_bytes, flops)
        space = MatmulWorkspace.allocate(64, out, 8, x.device)
        timed: dict[MatmulConfig, float] = {}
        for config in matmul_configs(inner):
            if report.in_time:
                calls = [partial(skinny_matmul, x, w, out=y, workspace=space, config=config) for w in weights]
                timed[config] = report.measure(
                    "skinny_matmul", shape, calls, num_bytes, flops, config=str(config)
                )
        report.best("skinny_matmul", shape, timed)
        del weights, calls


def cache_of(
    num_reqs: int, seq_len: int, block_size: int = 64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(k_cache, v_cache, block_table) of llama-8b with blocks in random order."""
    blocks = -(-seq_len // block_size)
    kv = randn(num_reqs * blocks, 2, block_size, 8, 128)
    table = torch.randperm(num_reqs * blocks, device="cuda").int().view(num_reqs, blocks)
    return kv[:, 0], kv[:, 1], table


def stage_decode_attention(report: Report) -> None:
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for num_reqs, seq_len in ((1, 256), (1, 8192), (32, 256), (32, 2048), (256, 640), (256, 2048)):
        num_bytes = num_reqs * seq_len * 2 * 8 * 128 * 2
        caches = [cache_of(num_reqs, seq_len) for _ in range(min(8, num_buffers(num_bytes)))]
        q = randn(num_reqs, 32, 128)
        lengths = torch.full((num_reqs,), seq_len, dtype=torch.int32, device="cuda")
        out = torch.empty_like(q)
        default = choose_num_splits(num_reqs, 8, seq_len, processors)
        shape = f"{num_reqs}x{seq_len}"
        timed: dict[DecodeConfig, float] = {}
        for splits, config in itertools.product(
            sorted({1, default, max(1, default // 2), default * 2}),
            (DecodeConfig(64, 4, 3), DecodeConfig(64, 4, 2), DecodeConfig(128, 4, 3), DecodeConfig(32, 2, 4),
             DecodeConfig(64, 8, 3), DecodeConfig(32, 4, 4), DecodeConfig(32, 4, 4, 128), DecodeConfig(64, 4, 4, 256)),
        ):  # fmt: skip
            if not report.in_time:
                break
            space = DecodeWorkspace.allocate(num_reqs, 32, 8, 128, splits, q.device)
            calls = [
                partial(
                    decode_attention,
                    q,
                    *cache,
                    lengths,
                    0.088,
                    num_splits=splits,
                    workspace=space,
                    out=out,
                    config=config,
                )
                for cache in caches
            ]
            seconds = report.measure(
                "decode_attention", shape, calls, num_bytes, splits=splits, config=str(config)
            )
            if splits == default:
                timed[config] = seconds
        report.best("decode_attention", shape, timed)
        del caches


def stage_prefill_attention(report: Report) -> None:
    for num_reqs, query_len in ((4, 4096), (16, 512), (1, 16384)):
        k, v, table = cache_of(num_reqs, query_len)
        q = randn(num_reqs * query_len, 32, 128)
        out = torch.empty_like(q)
        lengths = torch.full((num_reqs,), query_len, dtype=torch.int32, device="cuda")
        starts = (torch.arange(num_reqs + 1, device="cuda") * query_len).int()
        flops = num_reqs * query_len**2 * 2 * 32 * 128
        timed: dict[PrefillConfig, float] = {}
        for config in (
            PrefillConfig(128, 64, 8, 2), PrefillConfig(128, 64, 4, 2), PrefillConfig(128, 128, 8, 2),
            PrefillConfig(64, 64, 4, 2), PrefillConfig(128, 64, 8, 3), PrefillConfig(64, 128, 4, 2),
            PrefillConfig(256, 64, 8, 2), PrefillConfig(128, 32, 4, 3),
        ):  # fmt: skip
            if report.in_time:
                call = partial(
                    prefill_attention, q, k, v, table, starts, lengths, 0.088, out=out, config=config
                )
                timed[config] = report.measure(
                    "prefill_attention",
                    f"{num_reqs}x{query_len}",
                    [call],
                    4 * q.numel(),
                    flops,
                    config=str(config),
                )
        report.best("prefill_attention", f"{num_reqs}x{query_len}", timed)


def stage_elementwise(report: Report) -> None:
    for tokens in (1, 32, 256, 8192):
        count = min(16, num_buffers(tokens * 2 * INTER * 2))
        x, residual = (
            [randn(tokens, HIDDEN) for _ in range(count)],
            [randn(tokens, HIDDEN) for _ in range(count)],
        )
        weight, out = randn(HIDDEN), torch.empty(tokens, HIDDEN, dtype=BF16, device="cuda")
        calls = [partial(add_rms_norm, a, r, weight, 1e-5, out=out) for a, r in zip(x, residual)]
        report.measure("add_rms_norm", f"{tokens}x{HIDDEN}", calls, 4 * tokens * HIDDEN * 2)
        gates = [randn(tokens, 2 * INTER) for _ in range(count)]
        wide = torch.empty(tokens, INTER, dtype=BF16, device="cuda")
        report.measure(
            "silu_and_mul", f"{tokens}x{INTER}", [partial(silu_and_mul, g, out=wide) for g in gates],
            3 * tokens * INTER * 2,
        )  # fmt: skip
        qkvs = [randn(tokens, QKV) for _ in range(count)]
        k, v, _ = cache_of(1, max(64, tokens))
        slots, table = torch.randperm(tokens, device="cuda"), randn(8192, 128, dtype=torch.float32)
        q = torch.empty(tokens, 32, 128, dtype=BF16, device="cuda")
        calls = [partial(rope_and_store, p, k, v, slots, slots, table, 32, out=q) for p in qkvs]
        report.measure("rope_and_store", f"{tokens}x{QKV}", calls, 2 * tokens * QKV * 2)


def stage_step(report: Report) -> None:
    """A whole decode step of llama-8b for one request, all kernels ours, with and without dependent launch."""
    layers = [[randn(*WEIGHTS[name]) for name in ("qkv", "o", "gate_up", "down")] for _ in range(LAYERS)]
    head, norm_weight = randn(*WEIGHTS["lm_head"]), randn(HIDDEN)
    hidden, residuals = randn(1, HIDDEN), [randn(1, HIDDEN) for _ in range(2 * LAYERS + 2)]
    caches = [cache_of(1, 256) for _ in range(LAYERS)]
    position = torch.full((1,), 255, dtype=torch.int64, device="cuda")
    length = torch.full((1,), 256, dtype=torch.int32, device="cuda")
    table, attended = (
        randn(8192, 128, dtype=torch.float32),
        torch.empty(1, 32, 128, dtype=BF16, device="cuda"),
    )
    space = DecodeWorkspace.allocate(1, 32, 8, 128, 4, hidden.device)
    num_bytes = 2 * (LAYERS * (QKV * HIDDEN + HIDDEN**2 + 3 * INTER * HIDDEN) + VOCAB * HIDDEN)
    tuned = {
        shape: MatvecConfig(**config)
        for kernel in ("matvec", "matvec_gated")
        for shape, config in report.tuning.get(kernel, {}).items()
    }

    def step(pdl: bool) -> None:
        def product(x: torch.Tensor, weight: torch.Tensor, **fused: Any) -> torch.Tensor:
            config = tuned.get(f"{weight.shape[0]}x{weight.shape[1]}", MatvecConfig())
            return matvec(x, weight, config=config, pdl=pdl, **fused)

        x = hidden
        for i, (qkv, o, gate_up, down) in enumerate(layers):
            k, v, blocks = caches[i]
            packed = product(x, qkv, norm=NormBefore(norm_weight, 1e-5, *residuals[2 * i : 2 * i + 2]))
            q = rope_and_store(packed, k, v, position, position, table, 32, pdl=pdl)
            decode_attention(
                q, k, v, blocks, length, 0.088, num_splits=4, workspace=space, out=attended, pdl=pdl
            )
            x = product(attended.view(1, -1), o)
            norm = NormBefore(norm_weight, 1e-5, *residuals[2 * i + 1 : 2 * i + 3])
            x = product(product(x, gate_up, norm=norm, gated=True), down)
        product(x, head, norm=NormBefore(norm_weight, 1e-5, *residuals[-2:]))

    for pdl in (False, True):
        report.measure("step", "llama-8b x1", [partial(step, pdl)], num_bytes, pdl=pdl)


def stage_experts(report: Report) -> None:
    """The experts of one layer of qwen3-30b-a3b, routed at random; those that no token goes to are not read."""
    hidden, inner, num_experts, top_k = 2048, 768, 128, 8
    count = 2
    w13 = [randn(num_experts, 2 * inner, hidden) for _ in range(count)]
    w2 = [randn(num_experts, hidden, inner) for _ in range(count)]
    for tokens in (1, 32, 256, 8192):
        x = randn(tokens, hidden)
        weights, ids = topk_softmax(randn(tokens, num_experts, dtype=torch.float32), top_k, True)
        num_bytes = 2 * 3 * hidden * inner * ids.unique().numel()
        flops = 2 * 3 * hidden * inner * tokens * top_k
        calls = [partial(fused_experts, x, weights, ids, *each) for each in zip(w13, w2)]
        report.measure("fused_experts", f"{tokens}x{num_experts}x{hidden}x{inner}", calls, num_bytes, flops)


def stage_sampling(report: Report) -> None:
    """Draws from all logits, and by both filters, beside torch's operations. The limit is to read the logits once."""
    for rows in (1, 32, 256):
        logits = [randn(rows, VOCAB) for _ in range(min(4, num_buffers(2 * rows * VOCAB)))]
        floats = torch.tensor([[0.8], [0.9], [0.0]], device="cuda").repeat(1, rows)
        ints = torch.randint(1, 1000, (3, rows), dtype=torch.int32, device="cuda")
        for what, top_k_width, has_top_p in (
            ("all", 0, False),
            ("top_p", 0, True),
            ("top_k+top_p", 1024, True),
        ):
            hints = DrawHints(top_k_width=top_k_width, has_top_p=has_top_p, has_min_p=False)
            filters = {"has_top_k": top_k_width > 0, "has_top_p": has_top_p}
            calls = [partial(draw_token, each, floats, ints, **filters) for each in logits]
            torchs = [partial(reference_draw, each, floats, ints, hints) for each in logits]
            for kernel, each in (("draw_token", calls), ("draw_token by torch", torchs)):
                report.measure(kernel, f"{rows}x{VOCAB}", each, 2 * rows * VOCAB, filters=what)


STAGES: dict[str, Callable[[Report], None]] = {
    "matvec": stage_matvec,
    "gated": stage_gated,
    "step": stage_step,
    "matmul": stage_matmul,
    "decode": stage_decode_attention,
    "elementwise": stage_elementwise,
    "prefill": stage_prefill_attention,
    "experts": stage_experts,
    "sampling": stage_sampling,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "kernels-out")))
    parser.add_argument("--stage", nargs="*", choices=STAGES, default=list(STAGES))
    parser.add_argument("--seconds", type=float, default=80.0, help="time of one stage")
    chosen = parser.parse_args()
    report = Report(chosen.out, chosen.seconds)
    for name in chosen.stage:
        report.start()
        try:
            STAGES[name](report)
        except Exception as error:
            print(f"stage {name} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
        torch.cuda.empty_cache()
        report.write()


if __name__ == "__main__":
    main()
