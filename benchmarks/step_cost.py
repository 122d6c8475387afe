"""Host time of a whole step, from scheduling to output, over a model that does nothing.

    python benchmarks/step_cost.py [--json] [--num-requests 256] [--steps 256] [--staged] [--profile]

Every request decodes one token a step. ``--staged`` packs the inputs and replays (null) graphs as on a device with
memory of its own, whose copies and launches are then the host's. The vocabulary is small, because choosing tokens is
the device's work.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch

from inferplane.api import DeviceDescriptor, GraphBackend
from inferplane.api.attention import AttentionBackend
from inferplane.api.device import CallAgain
from inferplane.api.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from inferplane.api.model import ForwardBatch, Model
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.engine.output_processor import OutputProcessor
from inferplane.reference.platform import HostRuntime
from inferplane.request import EngineRequest, SamplingParams
from inferplane.runner.batch import Batch
from inferplane.runner.kv_groups import KVGroup
from inferplane.runner.runner import Runner
from inferplane.runner.sampler import Sampler
from inferplane.scheduler import Scheduler
from inferplane.tokenizer.ids_only import IdsOnlyTokenizer

BLOCK_SIZE = 16
PROMPT_TOKENS = 16
VOCAB_SIZE = 64


class NullModel(Model):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)
        self._hidden = torch.zeros(16384, 1)
        self._logits = torch.zeros(16384, VOCAB_SIZE)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._hidden[: len(batch.token_ids)]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._logits[: len(hidden)]

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        raise AssertionError("there are none")

    def attention_layers(self) -> list:
        return []


class NullAttention(AttentionBackend):
    name = "null"
    graph_safe = True

    @classmethod
    def unsupported_reason(cls, query):
        return None

    @classmethod
    def allocate_kv(cls, layer, num_blocks, dtype, device):
        return torch.zeros(0)

    def forward(self, layer, q, k, v, kv, metadata, *, sinks=None):
        raise AssertionError("not called")


class StagedRuntime(HostRuntime):
    is_host_memory = False

    def graphs(self) -> GraphBackend:
        return CallAgain()


class Engine:
    """The engine's loop with a clock between its parts."""

    def __init__(self, num_requests: int, num_steps: int, staged: bool) -> None:
        max_len = PROMPT_TOKENS + num_steps + 8
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype="float32")
        num_blocks = num_requests * (spec.num_blocks_for(max_len) + 1)
        kv_config = KVCacheConfig(num_blocks, (KVCacheGroup(("layer",), spec),))
        limits = SchedulerConfig(num_requests, num_requests * PROMPT_TOKENS, async_scheduling=True)
        self.scheduler = Scheduler(limits, CacheConfig(BLOCK_SIZE), max_len, kv_config)
        runtime = (StagedRuntime if staged else HostRuntime)(DeviceDescriptor("null", 0, "null", 1 << 30))
        self.runner = Runner(
            model=NullModel(),
            runtime=runtime,
            kv={},
            groups=[KVGroup(BLOCK_SIZE, ((NullAttention(), ("layer",)),))],
            batch=Batch(num_requests, max_len, [BLOCK_SIZE]),
            sampler=Sampler(num_requests, VOCAB_SIZE, runtime),
            vocab_size=VOCAB_SIZE,
        )
        if staged:
            self.runner.record(CallAgain(), [num_requests], max_len, [num_blocks])
        self.outputs = OutputProcessor(IdsOnlyTokenizer(()))
        params = SamplingParams(temperature=0.0, max_tokens=num_steps + 4)
        for number in range(num_requests):
            request = EngineRequest(
                request_id=f"request-{number}",
                prompt_token_ids=[number % VOCAB_SIZE] * PROMPT_TOKENS,
                params=params,
                max_tokens=num_steps + 4,
            )
            self.scheduler.add(request)
            self.outputs.add(f"request-{number}", [request])
        self.times: dict[str, list[float]] = defaultdict(list)

    def step(self) -> None:
        plan = self._timed("schedule", self.scheduler.schedule)
        assert plan is not None
        self._timed("execute", lambda: self.runner.execute(plan))
        pending = self._timed("sample", self.runner.sample)
        result = self._timed("result", pending.result)
        outputs = self._timed("update", lambda: self.scheduler.update(plan, result))
        self._timed("output", lambda: self.outputs.process(outputs))

    def _timed(self, part: str, call: Callable[[], object]):
        started = time.perf_counter()
        value = call()
        self.times[part].append(time.perf_counter() - started)
        return value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--staged", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    engine = Engine(args.num_requests, args.steps, args.staged)
    engine.step()
    engine.times.clear()
    profiler = cProfile.Profile()
    if args.profile:
        profiler.enable()
    for _ in range(args.steps):
        engine.step()
    profiler.disable()
    if args.profile:
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    parts = {part: statistics.median(times) * 1e3 for part, times in engine.times.items()}
    best = {part: min(times) * 1e3 for part, times in engine.times.items()}
    total = sum(parts.values())
    figures = {
        "engine": "inferplane",
        "case": f"step_{'staged_' if args.staged else ''}{args.num_requests}",
        "n": args.num_requests,
        **{f"{part}_ms": round(ms, 4) for part, ms in parts.items()},
        "step_ms": round(total, 4),
        **{f"{part}_best_ms": round(ms, 4) for part, ms in best.items()},
        "step_best_ms": round(sum(best.values()), 4),
        "us_per_request": round(total * 1e3 / args.num_requests, 3),
    }
    if args.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        sys.stdout.write("  ".join(f"{key} {value}" for key, value in figures.items()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
