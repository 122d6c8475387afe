"""Where the time of a decode step goes, from scheduler to text, and how near the whole is to reading the weights.

    python benchmarks/cpu/step.py [--model M] [--batch-sizes 1 8 64] [--steps 64] [--no-graphs] [--out FILE]

Greedy requests of ``--prompt`` tokens decode together in this process. Each part's time is its own, without that of the
parts that it calls. The limit is the time that the same threads take to read as many bytes as the step has to: all
weights and the keys and values of all tokens, measured before and after each batch size. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from inferplane import LLM, SamplingParams
from inferplane.layers import ParallelLMHead, walk_layers
from inferplane.layers.linear import Linear
from inferplane.runner.pending import PendingSample
from inferplane_cpu.graphs import RecordedProgram
from inferplane_kernels_cpu import native
from inferplane_kernels_cpu.pages import weight_pages

READ_BYTES = 256 << 20
READ_TURNS = 5


class Clock:
    """Adds up the time of calls by part."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inside: list[float] = []
        """For each call in progress the time of the calls within it."""

    def time(self, part: str, owner: Any, name: str) -> None:
        """From now on calls of ``owner.name`` count for the part."""
        call = getattr(owner, name)

        def timed(*arguments: Any, **more: Any) -> Any:
            self._inside.append(0.0)
            started = time.perf_counter()
            try:
                return call(*arguments, **more)
            finally:
                whole = time.perf_counter() - started
                self.seconds[part] += whole - self._inside.pop()
                if self._inside:
                    self._inside[-1] += whole

        setattr(owner, name, timed)


class TimedModel:
    """A model whose two calls count for parts."""

    def __init__(self, model: Any, clock: Clock) -> None:
        self._forward, self.compute_logits = model.__call__, model.compute_logits
        clock.time("model", self, "_forward")
        clock.time("logits", self, "compute_logits")

    def __call__(self, batch: Any) -> torch.Tensor:
        return self._forward(batch)


def watch(llm: LLM) -> Clock:
    clock = Clock()
    core = llm._client.core
    runner = core._executor.worker.runner
    clock.time("rest", llm, "_step")
    clock.time("schedule", core._scheduler, "schedule")
    clock.time("runner", core._executor, "execute")
    clock.time("prepare", runner.batch, "prepare")
    clock.time("inputs", runner, "to_device")
    runner._model = TimedModel(runner._model, clock)
    if runner._graphs is not None:
        clock.time("inputs", runner._graphs, "run")
        clock.time("model", RecordedProgram, "replay")
    clock.time("sample", core._executor, "sample")
    clock.time("result", PendingSample, "result")
    clock.time("update", core._scheduler, "update")
    clock.time("text", llm._front_end.outputs, "process")
    return clock


def weight_bytes(llm: LLM) -> int:
    """Of all products of a step, as they lie in memory."""
    layers = walk_layers(llm._client.core._executor.worker.model)
    return sum(held_bytes(layer._multiply) for layer in layers if isinstance(layer, Linear | ParallelLMHead))


def held_bytes(product: Any) -> int:
    """Of the tensors of a product and of those that it is made of."""
    if isinstance(product, torch.Tensor):
        return product.nbytes
    parts = product if isinstance(product, list | tuple) else getattr(product, "__dict__", {}).values()
    return sum(map(held_bytes, parts))


def kv_bytes_per_token(llm: LLM) -> float:
    specs = llm._client.core._executor.kv_cache_specs().values()
    return sum(spec.block_bytes / spec.block_size for spec in specs)


def read_bandwidth() -> float:
    """Bytes per second, of memory like that of weights. Unwritten, all of it would be one page."""
    memory = weight_pages.take(READ_BYTES).fill_(1)
    read = native.kernel("read_memory", native.pointer, native.int64)
    times = []
    for _ in range(READ_TURNS):
        started = time.perf_counter()
        read(memory.data_ptr(), READ_BYTES)
        times.append(time.perf_counter() - started)
    return READ_BYTES / median(times)


def measure(llm: LLM, clock: Clock, num_requests: int, num_prompt: int, num_steps: int) -> dict[str, Any]:
    rng = random.Random(num_requests)
    prompts = [[rng.randrange(1000, 20000) for _ in range(num_prompt)] for _ in range(num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 2, ignore_eos=True)
    steps: list[dict[str, float]] = []
    step: Callable[[], None] = llm._step

    def recorded_step() -> None:
        clock.seconds.clear()
        step()
        steps.append(dict(clock.seconds))

    llm._step = recorded_step  # type: ignore[method-assign]
    try:
        before = read_bandwidth()
        llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        after = read_bandwidth()
    finally:
        llm._step = step  # type: ignore[method-assign]
    decodes = steps[-num_steps:]
    parts = {part: median(each.get(part, 0.0) for each in decodes) * 1e3 for part in decodes[-1]}
    total_ms = median(sum(each.values()) for each in decodes) * 1e3
    num_tokens = num_requests * (num_prompt + num_steps / 2)
    num_bytes = weight_bytes(llm) + kv_bytes_per_token(llm) * num_tokens
    limit_ms = num_bytes / ((before + after) / 2) * 1e3
    return {
        "case": f"step_{num_requests}",
        "n": num_requests,
        "step_ms": round(total_ms, 3),
        **{f"{part}_ms": round(ms, 3) for part, ms in parts.items()},
        "not_model_ms": round(sum(parts.values()) - parts["model"] - parts["logits"], 3),
        "tok_s": round(num_requests / total_ms * 1e3, 1),
        "read_GB_s": round((before + after) / 2e9, 2),
        "read_MB": round(num_bytes / 1e6, 1),
        "limit_ms": round(limit_ms, 3),
        "of_limit": round(limit_ms / total_ms, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the demo model without it")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--load-format", default="auto", help="dummy for a folder that holds only a config.json"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON lines to write")
    args = parser.parse_args()
    llm = LLM(args.model, dtype=args.dtype, load_format=args.load_format, enable_graphs=not args.no_graphs)
    clock = watch(llm)
    rows = []
    for num_requests in args.batch_sizes:
        measure(llm, clock, num_requests, args.prompt, 4)
        rows.append(measure(llm, clock, num_requests, args.prompt, args.steps))
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if args.out:
        args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
