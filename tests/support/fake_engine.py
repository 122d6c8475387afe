"""An engine process whose model is a formula: ``python -m fake_engine INBOX OUTBOX``. Starts without torch.

The token after a sequence is `next_token` of it. Prompts that begin with one of the tokens below misbehave.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Callable, Sequence

from inferplane.api.kv import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from inferplane.api.worker import DoneStep, PendingStep
from inferplane.config import (
    CacheConfig,
    ConfigError,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from inferplane.executor import WorkerDiedError
from inferplane.plan import StepPlan, StepResult

VOCAB_SIZE = 256
RAISES, HANGS, LOSES_WORKER, ENDS_PROCESS = 250, 251, 252, 253
BLOCK_SIZE = 4
ASYNC_SCHEDULING = False
STEP_S = float(os.environ.get("FAKE_STEP_S", "0.002"))


def next_token(token_ids: Sequence[int]) -> int:
    """Some printable letter."""
    return 97 + (token_ids[-1] * 7 + len(token_ids)) % 26


def continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(next_token(token_ids))
    return token_ids[len(prompt) :]


def pooled_bytes(token_ids: Sequence[int]) -> bytes:
    """What is made of a prompt in place of tokens: two numbers, its length and the sum of its tokens."""
    return struct.pack("<2f", len(token_ids), sum(token_ids))


def fake_config(
    *, num_blocks: int = 200, max_model_len: int = 400, architecture: str = "Fake", **scheduler: int
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("fake", "/fake", {}, architecture, "float32", max_model_len, VOCAB_SIZE),
        device=DeviceConfig("fake"),
        cache=CacheConfig(BLOCK_SIZE, num_blocks * _block_bytes()),
        scheduler=SchedulerConfig(**{"async_scheduling": ASYNC_SCHEDULING, **scheduler}),
    )


def _spec() -> KVCacheSpec:
    return FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")


def _block_bytes() -> int:
    return _spec().block_bytes


class FakeExecutor:
    """Follows plans as a worker does, and checks that they name only requests that it was told of."""

    def __init__(self, config: EngineConfig, plugins: object, progress: bool = False) -> None:
        self._config = config
        self._token_ids: dict[str, list[int]] = {}
        self._num_computed: dict[str, int] = {}
        self._pools: set[str] = set()
        """Requests for a vector."""
        self._plan: StepPlan | None = None
        self.step_s = STEP_S

    def start(self) -> None:
        match self._config.model.architecture:
            case "RaisesConfigError":
                raise ConfigError("dtype", "this model has no such dtype")
            case "Raises":
                raise ZeroDivisionError("the loader is broken")
            case "Dies":
                os._exit(3)
            case "LoadsForever":
                time.sleep(3600)

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer": _spec()}

    def available_kv_bytes(self) -> int:
        assert self._config.cache.kv_cache_bytes is not None
        return self._config.cache.kv_cache_bytes

    def init_kv_cache(self, kv_config: KVCacheConfig) -> None: ...

    def warm_up(self) -> None: ...

    def execute(self, plan: StepPlan) -> None:
        for request_id in plan.removed_request_ids:
            self._token_ids.pop(request_id, None)
            self._num_computed.pop(request_id, None)
            self._pools.discard(request_id)
        for new in plan.new_requests:
            self._token_ids[new.request_id] = list(new.token_ids)
            self._num_computed[new.request_id] = new.num_computed_tokens
            if new.pooling is not None:
                self._pools.add(new.request_id)
        time.sleep(self.step_s)
        for request_id in plan.num_scheduled_tokens:
            match self._token_ids[request_id][0]:
                case 250:
                    raise ValueError("this request breaks the step")
                case 251:
                    time.sleep(3600)
                case 252:
                    raise WorkerDiedError("rank 1 is gone")
                case 253:
                    os._exit(7)
        self._plan = plan

    def sample(self) -> PendingStep:
        assert self._plan is not None
        sampled: dict[str, list[int]] = {}
        pooled: dict[str, bytes] = {}
        for request_id, num_tokens in self._plan.num_scheduled_tokens.items():
            self._num_computed[request_id] += num_tokens
            token_ids = self._token_ids[request_id]
            assert self._num_computed[request_id] <= len(token_ids), "a plan runs tokens that do not exist"
            if self._num_computed[request_id] < len(token_ids):
                continue
            if request_id in self._pools:
                pooled[request_id] = pooled_bytes(token_ids)
                continue
            token_ids.append(next_token(token_ids))
            sampled[request_id] = token_ids[-1:]
        return DoneStep(StepResult(step_id=self._plan.step_id, sampled_token_ids=sampled, pooled=pooled))

    def profile(self, run: Callable[[], object]) -> str | None:
        return None

    def check_health(self) -> None: ...

    def shutdown(self) -> None: ...


if __name__ == "__main__":
    from inferplane.engine import core, process

    core.make_executor = FakeExecutor  # type: ignore[assignment]
    process.import_model_code = lambda: None
    sys.exit(process.main(*sys.argv[1:]))
