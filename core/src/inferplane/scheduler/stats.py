"""`SchedulerStats`: what the scheduler tells about itself."""

from __future__ import annotations

import msgspec


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A moment's state, and totals since the start. Crosses processes."""

    num_running: int
    """Requests in the batch."""
    num_waiting: int
    """Requests that wait for a place, preempted and quarantined ones among them."""
    num_blocks: int
    num_free_blocks: int
    """Blocks that no request references, cached or not."""
    kv_usage: float
    """Share of the fullest pool that requests reference, 0 to 1."""
    num_preemptions: int
    """Total."""
    num_prefix_query_tokens: int
    """Total prompt tokens that were looked up in the prefix cache, once for each request."""
    num_prefix_hit_tokens: int
    """Total prompt tokens of these that were found."""
    num_prompt_tokens: int
    """Total of prompts that were computed to their end, cached tokens included."""
    num_generated_tokens: int
    """Total."""
    num_finished: dict[str, int]
    """Total of requests for each finish reason."""
