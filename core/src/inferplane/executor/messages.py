"""What the executor and its ranks say to each other: msgpack, decoded into these types and nothing else."""

from __future__ import annotations

import msgspec

from inferplane.config import EngineConfig
from inferplane.plan import StepPlan


class Start(msgspec.Struct, frozen=True, tag=True):
    """Make your worker. The first command; answered like a `Call`."""

    call_id: int
    config: EngineConfig
    init_method: str
    """Where the ranks meet, as in `ProcessGroup`."""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call this method of your worker and answer with what it returns, if that is a number."""

    call_id: int
    method: str
    """One of `CALLABLE`."""


class InitKVCache(msgspec.Struct, frozen=True, tag=True):
    """Allocate. A rank knows its own layers' specs, so only their names travel."""

    call_id: int
    num_blocks: list[int]
    """Of each pool."""
    groups: list[tuple[list[str], int]]
    """Of each group the layers and the pool."""


class Execute(msgspec.Struct, frozen=True, tag=True):
    """Execute, and accept what rank 0 samples. Answered only by `StepFailed`."""

    number: int
    """Counts the executed steps of this executor."""
    plan: StepPlan


class DidFail(msgspec.Struct, frozen=True, tag=True):
    """Did step ``number`` raise on your side? Answered with 1 or 0. When you have answered, you may go on."""

    call_id: int
    number: int


class Exit(msgspec.Struct, frozen=True, tag=True):
    """Close your worker and end."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    rank: int
    call_id: int
    value: int | None = None
    error: str | None = None
    """When the call raised: in a line what did, then the traceback."""


class StepFailed(msgspec.Struct, frozen=True, tag=True):
    rank: int
    number: int
    error: str
    """As in an `Answer`."""


CALLABLE = ("set_up", "join_group", "load_model", "available_kv_bytes", "warm_up")

Question = Start | Call | InitKVCache | DidFail
"""Commands that get an `Answer`."""

Command = Question | Execute | Exit
Report = Answer | StepFailed

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode


def commands_address(directory: str, rank: int) -> str:
    return f"ipc://{directory}/rank{rank}"


def reports_address(directory: str) -> str:
    return f"ipc://{directory}/reports"
