"""Plans that no request asked for: the largest step, to see its memory, and the first ones, before anybody waits."""

from __future__ import annotations

from collections.abc import Sequence

from inferplane.api.kv import KVCacheConfig
from inferplane.config import EngineConfig
from inferplane.plan import NewRequest, StepPlan
from inferplane.request import SamplingParams

NUM_TOKENS = 8
"""Enough to go through the paths of many rows, few enough to cost nothing."""

_ID = "warm-up"


def largest_plan(config: EngineConfig, block_sizes: Sequence[int]) -> StepPlan:
    """As many tokens as a step may have, of as many requests, all in the first block of each KV group: what is computed
    means nothing. Every request gets a token, by settings that take much memory."""
    num_tokens, max_len = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    num_reqs = min(config.scheduler.max_num_seqs, num_tokens)
    length = min(num_tokens // num_reqs, max_len)
    first = min(num_tokens - length * (num_reqs - 1), max_len)
    lengths = {f"{_ID}-{index}": first if index == 0 else length for index in range(num_reqs)}
    requests = [
        NewRequest(
            request_id=request_id,
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[[0] * -(-length // size) for size in block_sizes],
            params=SamplingParams(temperature=1.0, top_p=0.9),
            seed=0,
            max_tokens=1,
        )
        for request_id, length in lengths.items()
    ]
    return StepPlan(step_id=0, new_requests=requests, num_scheduled_tokens=lengths)


def warm_up_plans(kv_config: KVCacheConfig, max_model_len: int) -> list[StepPlan]:
    """A chunk of a prompt, its last token alone as in decoding, and the request's removal.

    They write KV into the first blocks, which nobody owns yet. Each plan's result may be dropped.
    """
    sizes = [group.spec.block_size for group in kv_config.groups]
    blocks = [kv_config.pool_blocks[group.pool] for group in kv_config.groups]
    room = min([max_model_len, *(num * size for num, size in zip(blocks, sizes))])
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
