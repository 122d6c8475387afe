"""Plans that take a worker through its first prefill and decode before anybody waits for them."""

from __future__ import annotations

from inferplane.api.kv import KVCacheConfig
from inferplane.plan import NewRequest, StepPlan
from inferplane.request import SamplingParams

NUM_TOKENS = 8
"""Enough to go through the paths of many rows, few enough to cost nothing."""

_ID = "warm-up"


def warm_up_plans(kv_config: KVCacheConfig, max_model_len: int) -> list[StepPlan]:
    """A chunk of a prompt, its last token alone as in decoding, and the request's removal.

    They write KV into the first blocks, which nobody owns yet. Each plan's result may be dropped.
    """
    sizes = [group.spec.block_size for group in kv_config.groups]
    room = min([max_model_len, *(kv_config.num_blocks * size for size in sizes)])
    num_tokens = min(NUM_TOKENS, room)
    if num_tokens < 2:
        return []
    request = NewRequest(
        request_id=_ID,
        token_ids=[0] * num_tokens,
        num_prompt_tokens=num_tokens,
        num_computed_tokens=0,
        block_ids=[list(range(-(-num_tokens // size))) for size in sizes],
        params=SamplingParams(),
        seed=0,
        max_tokens=1,
    )
    return [
        StepPlan(step_id=0, new_requests=[request], num_scheduled_tokens={_ID: num_tokens - 1}),
        StepPlan(step_id=0, num_scheduled_tokens={_ID: 1}),
        StepPlan(step_id=0, removed_request_ids=[_ID]),
    ]
