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
    means nothing. Every request gets a token, by settings that take much memory.

    Each has one token, as in decoding, and the rest are of prompts as long as can be, behind them: so the kernels of
    both kinds are those of later steps, and what they compile is compiled here.
    """
    num_tokens, max_len = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    lengths = [1] * min(config.scheduler.max_num_seqs, num_tokens)
    num_left = num_tokens - len(lengths)
    for index in reversed(range(len(lengths))):
        more = min(num_left, max_len - 1)
        lengths[index] += more
        num_left -= more
    requests = [
        NewRequest(
            request_id=f"{_ID}-{index}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[[0] * -(-length // size) for size in block_sizes],
            params=SamplingParams(temperature=1.0, top_p=0.9),
            seed=0,
            max_tokens=1,
        )
        for index, length in enumerate(lengths)
    ]
    counts = {request.request_id: request.num_prompt_tokens for request in requests}
    return StepPlan(step_id=0, new_requests=requests, num_scheduled_tokens=counts)


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
