"""Host time of the scheduler alone: a null runner answers every plan at once, and only the scheduler is timed.

    python benchmarks/scheduler_cost.py [--json] [--num-requests 256] [--steps 512]

Cases: ``decode`` is the steady state in which every running request gets one token a step; ``mixed`` also has a
prompt of half the budget arriving and a request ending in every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time

from inferplane.api.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.plan import StepPlan, StepResult
from inferplane.request import EngineRequest, SamplingParams
from inferplane.scheduler import Scheduler

BLOCK_SIZE = 16
PROMPT_TOKENS = 128
BUDGET_TOKENS = 2048


class NullRunner:
    """Returns a token for every request that reached the end of its known tokens. It keeps what a worker keeps of each:
    how many tokens it knows and how many it has computed."""

    def __init__(self) -> None:
        self._num_left: dict[str, int] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        num_left = self._num_left
        for request_id in plan.removed_request_ids:
            num_left.pop(request_id, None)
        for request in plan.new_requests:
            num_left[request.request_id] = len(request.token_ids) - request.num_computed_tokens
        sampled = {}
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            num_left[request_id] -= num_tokens
            if num_left[request_id] == 0:
                sampled[request_id] = [7]
                num_left[request_id] = 1
        return StepResult(step_id=plan.step_id, sampled_token_ids=sampled)


def make_scheduler(num_requests: int, num_steps: int) -> Scheduler:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_dim=128, dtype="bfloat16")
    blocks_of_each = spec.num_blocks_for(PROMPT_TOKENS + BUDGET_TOKENS + 2 * num_steps)
    kv_config = KVCacheConfig(
        num_blocks=num_requests * blocks_of_each, groups=(KVCacheGroup(("layer",), spec),)
    )
    limits = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=BUDGET_TOKENS)
    return Scheduler(limits, CacheConfig(block_size=BLOCK_SIZE), 1 << 20, kv_config)


def make_request(number: int, num_prompt_tokens: int, max_tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=f"request-{number}",
        prompt_token_ids=[(number * 7919 + position) % 32000 for position in range(num_prompt_tokens)],
        params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        max_tokens=max_tokens,
        eos_token_ids=[2],
    )


def run_case(case: str, num_requests: int, num_steps: int) -> dict[str, object]:
    """Times `num_steps` steps of schedule and update; returns milliseconds a step."""
    scheduler, runner = make_scheduler(num_requests, num_steps), NullRunner()
    for number in range(num_requests):
        # In the mixed case one request ends in each step, where another comes.
        max_tokens = 2 * num_steps if case == "decode" else num_steps // 4 + number
        scheduler.add(make_request(number, PROMPT_TOKENS, max_tokens))
    while scheduler.stats().num_prompt_tokens < num_requests * PROMPT_TOKENS:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.update(plan, runner.execute(plan))
    schedule_s, update_s, num_scheduled = [], [], []
    next_number = num_requests
    gc.collect()
    for _ in range(num_steps):
        if case == "mixed":
            scheduler.add(make_request(next_number, BUDGET_TOKENS // 2, num_requests))
            next_number += 1
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        assert plan is not None
        result = runner.execute(plan)
        executed = time.perf_counter()
        scheduler.update(plan, result)
        done = time.perf_counter()
        schedule_s.append(planned - start)
        update_s.append(done - executed)
        num_scheduled.append(len(plan.num_scheduled_tokens))
    step_s = [first + second for first, second in zip(schedule_s, update_s, strict=True)]
    return {
        "engine": "inferplane",
        "case": f"scheduler_{case}_{num_requests}",
        "device": "host",
        "n": num_requests,
        "num_steps": num_steps,
        "mean_num_scheduled_requests": round(statistics.mean(num_scheduled), 1),
        "schedule_ms": round(statistics.median(schedule_s) * 1e3, 4),
        "update_ms": round(statistics.median(update_s) * 1e3, 4),
        "step_ms": round(statistics.median(step_s) * 1e3, 4),
        "step_best_ms": round(min(step_s) * 1e3, 4),
        "step_mean_ms": round(statistics.mean(step_s) * 1e3, 4),
        "step_p99_ms": round(statistics.quantiles(step_s, n=100)[98] * 1e3, 4),
        "us_per_request": round(statistics.median(step_s) * 1e6 / statistics.mean(num_scheduled), 3),
        "python": platform.python_version(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object for each case and nothing else"
    )
    args = parser.parse_args()
    for case in ("decode", "mixed"):
        figures = run_case(case, args.num_requests, args.steps)
        line = (
            json.dumps(figures)
            if args.json
            else (
                f"{figures['case']}: {figures['step_ms']} ms a step (schedule {figures['schedule_ms']}, update "
                f"{figures['update_ms']}; 99 % under {figures['step_p99_ms']}), "
                f"{figures['us_per_request']} µs a request"
            )
        )
        sys.stdout.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
