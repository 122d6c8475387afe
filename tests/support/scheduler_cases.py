"""The scheduler with a worker that verifies every plan, and requests for it."""

from __future__ import annotations

from typing import Any

from inferplane.api.kv import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from inferplane.config.engine import CacheConfig, SchedulerConfig
from inferplane.request import EngineRequest, SamplingParams
from inferplane.scheduler import Scheduler
from simulated_engine import SimulatedEngine, SimulatedWorker

BLOCK_SIZE = 4


def make_engine(
    num_blocks: int = 64,
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    policy: str = "fcfs",
    policies: Any = None,
    max_num_waiting: int | None = None,
    max_num_mixed_prompt_tokens: int | None = None,
    max_model_len: int = 1000,
    enable_prefix_caching: bool = True,
    num_plans_ahead: int = 0,
    seed: int = 0,
) -> SimulatedEngine:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=8, dtype="float32")
    kv_config = KVCacheConfig(num_blocks, (KVCacheGroup(("layer",), spec),))
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            policy,
            max_num_waiting,
            max_num_mixed_prompt_tokens=max_num_mixed_prompt_tokens,
        ),
        CacheConfig(BLOCK_SIZE, enable_prefix_caching=enable_prefix_caching),
        max_model_len,
        kv_config,
        seed=seed,
        policies=policies,
    )
    worker = SimulatedWorker(kv_config, max_num_seqs, max_num_batched_tokens)
    return SimulatedEngine(scheduler, worker, num_plans_ahead)


def make_request(
    request_id: str, prompt: list[int] | int, max_tokens: int = 4, **fields: Any
) -> EngineRequest:
    """A prompt given as a length has tokens that no other prompt begins with."""
    if isinstance(prompt, int):
        prompt = [hash(request_id) % 100_000, *range(1, prompt)]
    engine_fields = {
        name: fields.pop(name) for name in ("eos_token_ids", "priority", "cache_salt") if name in fields
    }
    params = SamplingParams(max_tokens=max_tokens, **{"seed": 1, **fields})
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, params=params, max_tokens=max_tokens, **engine_fields
    )


def check_all_returned(engine: SimulatedEngine) -> None:
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.kv_usage == 0.0
    assert not engine.scheduler.has_work()
    assert engine.scheduler.schedule() is None
    engine.scheduler._kv.pools[0].check()
