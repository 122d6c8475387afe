"""An engine as those who serve it see it: the server, and plugins that bring routes through ``endpoints``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Protocol

from inferplane.config import EngineConfig
from inferplane.engine.output import RequestDelta
from inferplane.engine.stats import EngineStats
from inferplane.request import PoolingParams, SamplingParams
from inferplane.tokenizer import Tokenizer

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineStats",
    "PoolingParams",
    "RequestDelta",
    "SamplingParams",
    "Tokenizer",
]


class Engine(Protocol):
    """`inferplane.engine.async_engine.AsyncEngine`, or a test's stand-in."""

    @property
    def config(self) -> EngineConfig: ...

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """Sampling parameters that the model recommends."""
        ...

    @property
    def is_ready(self) -> bool: ...

    async def wait_ready(self) -> None: ...

    def check_health(self) -> None:
        """Raises `EngineDeadError`."""
        ...

    async def encode_prompt(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; long texts are encoded off the event loop."""
        ...

    def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> AsyncGenerator[RequestDelta, None]:
        """Refusals are raised by the first ``__anext__``; closing the generator aborts the request."""
        ...

    async def pool(
        self,
        prompt_token_ids: list[int],
        params: PoolingParams,
        *,
        request_id: str,
        second_text_start: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> RequestDelta:
        """The one event of a request for a vector of its prompt. Cancelling the task that waits ends the request."""
        ...

    def stats(self) -> EngineStats: ...

    async def drain(self, timeout_s: float) -> Any: ...

    async def shutdown(self) -> None: ...
