"""Where the server is between its start and its end, and what it still has to finish."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

from inferplane.api.engine import Engine
from inferplane.engine.errors import EngineDeadError
from inferplane_server.errors import ApiError, unavailable


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    """Finishes what is in flight, takes nothing new."""
    UNHEALTHY = "unhealthy"
    """The engine ended or hangs."""


class Lifecycle:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_draining = False
        self._num_in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def state(self) -> State:
        if self.engine_fault() is not None:
            return State.UNHEALTHY
        if self._is_draining:
            return State.DRAINING
        return State.READY if self._engine.is_ready else State.STARTING

    def engine_fault(self) -> EngineDeadError | None:
        """What ails the engine; None while it works."""
        try:
            self._engine.check_health()
        except EngineDeadError as error:
            return error
        return None

    def check_ready(self) -> None:
        """Raises `ApiError` with status 503 unless requests are served."""
        if error := self.why_unready():
            raise error

    def why_unready(self) -> ApiError | None:
        match self.state:
            case State.READY:
                return None
            case State.STARTING:
                return unavailable("The model is still being loaded.", "starting")
            case State.DRAINING:
                return unavailable("The server is shutting down and takes no new requests.", "draining")
            case State.UNHEALTHY:
                return unavailable(
                    f"The engine does not work: {self.engine_fault()}", "engine_dead", retry_after_s=10
                )

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Counts a request in flight for the length of the block. Raises `ApiError` with 503 unless ready."""
        self.check_ready()
        self._num_in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_in_flight -= 1
            if self._num_in_flight == 0:
                self._idle.set()

    def begin_drain(self) -> None:
        self._is_draining = True

    async def wait_idle(self, timeout_s: float) -> bool:
        """Waits until no request is in flight; False when some still are at the end of the time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
