"""What the front end and the engine process say to each other, as msgpack. Nothing is pickled."""

from __future__ import annotations

import msgspec

from inferplane.config import EngineConfig
from inferplane.engine.stats import EngineStats
from inferplane.request import EngineOutput, EngineRequest


class Configure(msgspec.Struct, frozen=True, tag="configure"):
    """The first message: what to load."""

    config: EngineConfig
    heartbeat_s: float
    """Time between two heartbeats."""
    log_level: int
    """As of the standard `logging`."""


class Add(msgspec.Struct, frozen=True, tag="add"):
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    request_ids: list[str]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Drop everything and end."""


ToEngine = Configure | Add | Abort | Shutdown


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded; these are the numbers that came of it."""

    max_model_len: int
    stats: EngineStats
    timings: dict[str, float]
    """Seconds of each phase of the start."""


class Rejection(msgspec.Struct, frozen=True):
    """A request that the core refused to take."""

    request_id: str
    kind: str
    """``queue_full``, ``too_large`` or ``invalid``."""
    param: str
    """The field at fault, when it is too large."""
    message: str


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """After each step, and whenever the figures changed without one."""

    outputs: list[EngineOutput]
    stats: EngineStats
    rejections: list[Rejection] = []


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """Sent from a thread of its own, so that it also comes during a long step, but not from a stopped process."""

    step_age_s: float
    """How long the current step has been running; 0 between steps."""


class Fatal(msgspec.Struct, frozen=True, tag="fatal"):
    """The last message of an engine that cannot go on."""

    kind: str
    """``config``, ``model`` or ``engine``."""
    option: str
    """The setting at fault, for ``config``."""
    message: str


FromEngine = Ready | Progress | Heartbeat | Fatal

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
