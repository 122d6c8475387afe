"""The executor of one rank."""

from __future__ import annotations

import pytest

from inferplane.api.kv import KVCacheConfig, KVCacheGroup
from inferplane.executor import WorkerDiedError, make_executor
from inferplane.plan import StepPlan
from inferplane.plugins import load_plugins


def test_every_call_is_the_workers(sockets_platform, socket_config):
    executor = make_executor(socket_config(1), load_plugins(quiet=True))
    with pytest.raises(RuntimeError, match="not started"):
        executor.kv_cache_specs()
    executor.start()
    specs = executor.kv_cache_specs()
    assert executor.available_kv_bytes() == 1000
    executor.init_kv_cache(KVCacheConfig(12, (KVCacheGroup(("a", "b"), specs["a"]),)))
    executor.warm_up()
    executor.execute(StepPlan(step_id=1))
    assert executor.sample().result().sampled_token_ids == {"a": [12]}
    with pytest.raises(ValueError, match="order on rank 0"):
        executor.execute(StepPlan(step_id=2, removed_request_ids=["raise@0"]))
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(WorkerDiedError, match="shut down"):
        executor.check_health()
