"""Commands and reports come out of msgpack as they went in."""

from __future__ import annotations

import msgspec
import pytest

from inferplane.executor import messages
from inferplane.plan import NewRequest, StepPlan
from inferplane.request import SamplingParams


def test_commands_survive_the_trip(socket_config):
    request = NewRequest(
        request_id="a", token_ids=[1, 2], num_prompt_tokens=2, num_computed_tokens=0, block_ids=[[3]],
        params=SamplingParams(temperature=0.5, logit_bias={7: 2.0}, stop="x", logits_processors={"p": {"k": [1]}}),
        seed=2**64 - 1, max_tokens=3,
    )  # fmt: skip
    commands = [
        messages.Start(1, socket_config(2), "file:///x"),
        messages.Call(2, "warm_up"),
        messages.InitKVCache(3, [10, 4], [(["a", "b"], 0), (["c"], 1)]),
        messages.Execute(4, StepPlan(step_id=9, new_requests=[request], num_scheduled_tokens={"a": 2})),
        messages.DidFail(5, 4),
        messages.Exit(),
    ]
    for command in commands:
        assert messages.decode_command(messages.encode(command)) == command


def test_reports_survive_the_trip():
    for report in (
        messages.Answer(1, 2, value=3),
        messages.Answer(1, 2, error="e"),
        messages.StepFailed(1, 2, "e"),
    ):
        assert messages.decode_report(messages.encode(report)) == report


def test_anything_else_is_refused():
    with pytest.raises(msgspec.ValidationError):
        messages.decode_command(msgspec.msgpack.encode({"type": "System", "command": "ls"}))
