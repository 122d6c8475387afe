"""``/v1/chat/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane.engine.output import CompletionDelta
from inferplane_server.body import body_schema, read_body
from inferplane_server.chunks import ChunkFrame
from inferplane_server.connection import BoundToCaller
from inferplane_server.generation import Choice, GenerationRequest, Usage, collect, stream
from inferplane_server.logprobs import chat_logprobs, prompt_logprobs_by_id
from inferplane_server.prompts import encode_prompts
from inferplane_server.protocol.chat import ChatRequest
from inferplane_server.service import Service, new_id
from inferplane_server.sse import EventStream, encode_json

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation; as server-sent events when ``stream`` is true."""
    service = Service.of(request)
    service.lifecycle.check_ready()
    body = await read_body(request, ChatRequest, service.settings.max_body_bytes)
    model = service.check_model(body.model)
    body.check()
    return BoundToCaller(service.lifecycle, ChatJob(service, body, model).respond)


class ChatJob:
    """One chat request on its way from messages to a response."""

    def __init__(self, service: Service, body: ChatRequest, model: str) -> None:
        self._service = service
        self._body = body
        self._num_top = body.top_logprobs or 0
        self._id = new_id("chatcmpl")
        self._header = {
            "id": self._id,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": service.system_fingerprint,
        }

    async def respond(self) -> Response:
        generation = await self._prepare()
        if self._body.stream:
            return EventStream(self._events(generation))
        collected = await collect(self._service.engine, self._service.metrics, generation)
        answer: dict[str, Any] = {
            **self._header,
            "choices": [self._choice(index, choice) for index, choice in enumerate(collected.choices)],
            "usage": collected.usage.as_dict(),
        }
        if (positions := collected.prompt_logprobs[0]) is not None:
            answer["prompt_logprobs"] = prompt_logprobs_by_id(positions, self._service.token_texts)
        return Response(encode_json(answer), media_type="application/json")

    async def _prepare(self) -> GenerationRequest:
        body, engine = self._body, self._service.engine
        max_model_len = engine.config.model.max_model_len
        params = body.sampling_params(
            engine.generation_defaults,
            max_tokens=body.max_output_tokens,
            max_model_len=max_model_len,
            logprobs=self._num_top if body.logprobs else None,
        )
        params.check_vocabulary(engine.config.model.vocab_size)
        text = await self._service.chat_prompts.render(body)
        prompts = await encode_prompts(
            engine, [text], add_special_tokens=body.add_special_tokens, max_tokens=params.max_tokens
        )
        return GenerationRequest(
            id=self._id,
            prompts=prompts,
            params=params,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        has_logprobs = self._body.logprobs
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": chat_logprobs(choice.logprobs, self._service.token_texts, self._num_top)
            if has_logprobs
            else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    async def _events(self, generation: GenerationRequest) -> AsyncGenerator[bytes, None]:
        usage = Usage()
        frame = ChunkFrame(self._header, self._body.stream_options, usage)
        opened: set[int] = set()
        async with aclosing(stream(self._service.engine, self._service.metrics, generation)) as batches:
            async for batch in batches:
                out = b""
                for item in batch:
                    usage.add(item)
                    for completion in item.delta.completions:
                        if completion.index not in opened:
                            opened.add(completion.index)
                            out += frame.chunk(self._opening(completion.index))
                        if completion.text or completion.logprobs or completion.finish_reason:
                            out += frame.chunk(self._chunk_choice(completion))
                if out:
                    yield out
        yield frame.end()

    @staticmethod
    def _opening(index: int) -> bytes:
        delta = b'{"role":"assistant","content":""}'
        return b'{"index":%d,"delta":%b,"logprobs":null,"finish_reason":null}' % (index, delta)

    def _chunk_choice(self, completion: CompletionDelta) -> bytes:
        delta = (
            b'{"content":' + encode_json(completion.text) + b"}"
            if completion.text or completion.logprobs
            else b"{}"
        )
        logprobs = b"null"
        if self._body.logprobs and completion.logprobs:
            logprobs = encode_json(
                chat_logprobs(completion.logprobs, self._service.token_texts, self._num_top)
            )
        ending = b"null"
        if completion.finish_reason is not None:
            ending = (
                encode_json(completion.finish_reason)
                + b',"stop_reason":'
                + encode_json(completion.stop_reason)
            )
        return b'{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}' % (
            completion.index,
            delta,
            logprobs,
            ending,
        )
