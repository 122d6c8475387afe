"""The largest step, whose memory is measured."""

from __future__ import annotations

import pytest

from inferplane.config import DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from inferplane.runner.warm_up import largest_plan


@pytest.mark.parametrize(
    ("num_reqs", "num_tokens", "max_len", "ends_with"),
    [
        (4, 100, 4096, [1, 1, 97]),
        (4, 100, 50, [1, 48, 50]),
        (4, 100, 10, [10, 10, 10]),
        (1, 100, 4096, [100]),
        (8, 3, 4096, [1, 1, 1]),
    ],
)
def test_single_tokens_and_prompts_as_long_as_can_be(
    num_reqs: int, num_tokens: int, max_len: int, ends_with: list[int]
) -> None:
    model = ModelConfig(
        model="m",
        path="m",
        hf_config={},
        architecture="A",
        dtype="float32",
        max_model_len=max_len,
        vocab_size=9,
    )
    scheduler = SchedulerConfig(max_num_seqs=num_reqs, max_num_batched_tokens=num_tokens)
    config = EngineConfig(model=model, device=DeviceConfig("reference"), scheduler=scheduler)
    plan = largest_plan(config, [16, 32])
    lengths = list(plan.num_scheduled_tokens.values())
    assert len(lengths) == min(num_reqs, num_tokens)
    assert sum(lengths) == min(num_tokens, num_reqs * max_len)
    assert lengths[-len(ends_with) :] == ends_with and sorted(lengths) == lengths
    for request, length in zip(plan.new_requests, lengths):
        assert len(request.token_ids) == request.num_prompt_tokens == length
        assert [len(ids) for ids in request.block_ids] == [-(-length // 16), -(-length // 32)]
