"""`Job`: one request that generates, on its way from a body to a response. One subclass for each API."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from inferplane_server.body import read_body
from inferplane_server.connection import BoundToCaller
from inferplane_server.generation import Collected, GenerationRequest, collect
from inferplane_server.prompts import encode_prompts
from inferplane_server.protocol.chat import ChatRequest
from inferplane_server.protocol.completions import CompletionRequest, RawPrompt
from inferplane_server.service import Service, new_id
from inferplane_server.sse import EventStream, encode_json

Body = TypeVar("Body", ChatRequest, CompletionRequest)


async def answer(
    request: Request, body_type: type[Body], make_job: Callable[[Service, Body, str], Job[Body]]
) -> Response:
    """What the routes of every API that generates do."""
    service = Service.of(request)
    service.lifecycle.check_ready()
    body = await read_body(request, body_type, service.settings.max_body_bytes)
    model = service.check_model(body.model)
    service.check_generates()
    body.check()
    return BoundToCaller(service.lifecycle, make_job(service, body, model).respond)


class Job(ABC, Generic[Body]):
    """`respond` prepares the generation, runs it, and answers as a stream or as a whole."""

    def __init__(self, service: Service, body: Body, model: str, *, id_prefix: str, kind: str) -> None:
        """``kind`` is the ``object`` of the answer."""
        self._service = service
        self._body: Body = body
        self._id = new_id(id_prefix)
        self._header = {
            "id": self._id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.system_fingerprint,
        }

    async def respond(self) -> Response:
        generation = await self._prepare()
        if self._body.stream:
            return EventStream(self._events(generation))
        collected = await collect(self._service.engine, self._service.metrics, generation)
        whole = {
            **self._header,
            "choices": self._choices(generation, collected),
            "usage": collected.usage.as_dict(),
            **self._more(collected),
        }
        return Response(encode_json(whole), media_type="application/json")

    async def _prepare(self) -> GenerationRequest:
        """The body as the engine takes it. Raises what is wrong with it."""
        body, engine = self._body, self._service.engine
        params = body.sampling_params(
            engine.generation_defaults,
            max_tokens=self._max_tokens,
            max_model_len=engine.config.model.max_model_len,
            **self._logprobs_wanted,
        )
        params.check_vocabulary(engine.config.model.vocab_size)
        prompts = await encode_prompts(
            engine,
            await self._prompts(),
            add_special_tokens=body.add_special_tokens,
            max_tokens=params.max_tokens,
        )
        return GenerationRequest(
            id=self._id, prompts=prompts, params=params, priority=body.priority, cache_salt=body.cache_salt
        )

    @property
    @abstractmethod
    def _max_tokens(self) -> int | None: ...

    @property
    @abstractmethod
    def _logprobs_wanted(self) -> dict[str, Any]:
        """As sampling parameters."""

    @abstractmethod
    async def _prompts(self) -> Sequence[RawPrompt]: ...

    @abstractmethod
    def _choices(self, generation: GenerationRequest, collected: Collected) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _events(self, generation: GenerationRequest) -> AsyncGenerator[bytes, None]:
        """The answer as a stream of whole server-sent events."""

    def _more(self, collected: Collected) -> dict[str, Any]:
        """Further fields of a whole answer."""
        return {}
