"""`EngineStats`: the figures of one moment, as the engine pushes them to the front end."""

from __future__ import annotations

from typing import Any

import msgspec

from inferplane.scheduler.stats import SchedulerStats


class EngineStats(SchedulerStats, frozen=True, kw_only=True):
    """The scheduler's figures and those of the step loop. ``num_steps`` is a total since the start."""

    num_steps: int = 0
    last_step_s: float = 0.0
    """Duration of the last step, from plan to results."""
    expert_tokens: dict[str, list[int]] = msgspec.field(default_factory=dict)
    """Total tokens that each expert got, by the name of its router; empty unless ``count_expert_tokens`` is set. Up to
    a second old while requests run."""

    @classmethod
    def of(cls, scheduler: SchedulerStats, **figures: Any) -> EngineStats:
        """``figures`` are the fields that the scheduler does not know."""
        return cls(**msgspec.structs.asdict(scheduler), **figures)

    def without_requests(self) -> EngineStats:
        """The same totals, for an engine that has ended."""
        return msgspec.structs.replace(
            self, num_running=0, num_waiting=0, num_free_blocks=self.num_blocks, kv_usage=0.0
        )

    @classmethod
    def at_start(cls) -> EngineStats:
        """Of an engine that has not reported yet."""
        return cls(
            num_running=0,
            num_waiting=0,
            num_blocks=0,
            num_free_blocks=0,
            kv_usage=0.0,
            num_preemptions=0,
            num_prefix_query_tokens=0,
            num_prefix_hit_tokens=0,
            num_prompt_tokens=0,
            num_generated_tokens=0,
            num_finished={},
        )
