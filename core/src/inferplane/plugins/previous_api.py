"""What a plugin of the previous API major gives, made into what this one expects.

API 1 differs from API 2 in this:

- `AttentionBackend.unsupported_reason` took ``(layer, dtype)`` with the dtype as a name, and now takes an
  `AttentionQuery`. `AttentionBackend.forward` had no ``sinks``, and a layer had neither a soft cap nor a KV cache of
  another dtype: a backend of API 1 cannot know that it does not know them, so it is asked only about layers without.

- `Worker.sample` returned the result itself, and the next plan never came before it. On the other ranks
  ``Worker.accept`` was told the tokens, and now takes them from the communicator: a worker that overrides it so runs on
  one rank.

- Nobody counted the devices that ranks need: a platform whose ranks share one need not have said so.

Everything else that API 2 changed is an addition with a default. Imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from inferplane.api.attention import AttentionBackend, AttentionLayer, AttentionQuery
from inferplane.api.platform import Platform
from inferplane.api.worker import DoneStep, PendingStep, Worker, WorkerContext
from inferplane.config import ConfigError


def adapt(hook: str, answer: Any) -> Any:
    """What a hook of an API 1 plugin returned, for this core. Raises TypeError for what is not of API 1."""
    if hook == "attention_backends":
        return [adapt_attention(backend) for backend in answer]
    if hook == "create_platform" and isinstance(answer, Platform):
        type(answer).ranks_share_device = True
    return answer


def adapt_attention(backend: Any) -> type[AttentionBackend]:
    """A subclass that speaks API 2, under the same name and priority."""
    parameters = inspect.signature(backend.unsupported_reason).parameters
    if len(parameters) == 1:
        raise TypeError(
            f"{backend.__name__}.unsupported_reason takes an AttentionQuery, which is of plugin API 2, but its "
            "plugin declares API 1; declare api=(2, 0)"
        )

    class Adapted(backend):
        @classmethod
        def unsupported_reason(cls, query: AttentionQuery) -> str | None:
            if reason := _beyond_api_1(query):
                return f"was written for plugin API 1, which has no {reason}"
            return super().unsupported_reason(query.layer, str(query.dtype).removeprefix("torch."))

        def forward(
            self,
            layer: AttentionLayer,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            kv: torch.Tensor,
            metadata: Any,
            *,
            sinks: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return super().forward(layer, q, k, v, kv, metadata)

    Adapted.__name__, Adapted.__qualname__ = backend.__name__, backend.__qualname__
    return Adapted


def adapt_worker(worker: type[Worker]) -> type[Worker]:
    """A subclass whose step is done when `sample` returns, whatever the class's own `sample` gives."""

    class Adapted(worker):  # type: ignore[misc, valid-type]
        def __init__(self, context: WorkerContext) -> None:
            if context.config.scheduler.async_scheduling:
                raise ConfigError(
                    "async_scheduling",
                    f"async_scheduling needs plugin API 2; platform {context.device.platform!r} was written for API 1",
                )
            if context.group.world_size > 1 and len(inspect.signature(worker.accept).parameters) > 1:
                raise ConfigError(
                    "tensor_parallel_size",
                    f"tensor_parallel_size {context.group.world_size} needs plugin API 2: the worker of platform "
                    f"{context.device.platform!r} accepts tokens as in API 1",
                )
            super().__init__(context)

        def sample(self) -> PendingStep:
            result = super().sample()
            return result if isinstance(result, PendingStep) else DoneStep(result)

    Adapted.__name__, Adapted.__qualname__ = worker.__name__, worker.__qualname__
    return Adapted


def _beyond_api_1(query: AttentionQuery) -> str | None:
    lacking: Sequence[tuple[bool, str]] = (
        (query.layer.soft_cap is not None, "soft cap"),
        (query.layer.has_sinks, "attention sinks"),
        (query.kv_dtype != query.dtype, "KV cache of another dtype"),
    )
    return next((what for is_asked, what in lacking if is_asked), None)
