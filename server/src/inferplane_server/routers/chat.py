"""``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane.engine.output import CompletionDelta
from inferplane_server.body import body_schema
from inferplane_server.chunks import ChunkFrame, encode_choice, is_shown
from inferplane_server.generation import Choice, Collected, GenerationRequest, Usage, stream
from inferplane_server.job import Job, answer
from inferplane_server.logprobs import chat_logprobs, prompt_logprobs_by_id
from inferplane_server.protocol.chat import ChatRequest
from inferplane_server.protocol.completions import RawPrompt
from inferplane_server.service import Service
from inferplane_server.sse import encode_json

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest))
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation; as server-sent events when ``stream`` is true."""
    return await answer(request, ChatRequest, ChatJob)


class ChatJob(Job[ChatRequest]):
    """One chat request on its way from messages to a response."""

    def __init__(self, service: Service, body: ChatRequest, model: str) -> None:
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        super().__init__(service, body, model, id_prefix="chatcmpl", kind=kind)
        self._num_top = body.top_logprobs or 0

    @property
    def _max_tokens(self) -> int | None:
        return self._body.max_output_tokens

    @property
    def _logprobs_wanted(self) -> dict[str, Any]:
        return {"logprobs": self._num_top if self._body.logprobs else None}

    async def _prompts(self) -> list[RawPrompt]:
        return [await self._service.chat_prompts.render(self._body)]

    def _choices(self, generation: GenerationRequest, collected: Collected) -> list[dict[str, Any]]:
        return [self._choice(index, choice) for index, choice in enumerate(collected.choices)]

    def _more(self, collected: Collected) -> dict[str, Any]:
        positions = collected.prompt_logprobs[0]
        if positions is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs_by_id(positions, self._service.token_texts)}

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
            **({"token_ids": choice.token_ids} if self._body.return_token_ids else {}),
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
                        if is_shown(completion) or self._body.return_token_ids:
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
        return encode_choice(
            completion.index,
            b'"delta":' + delta,
            completion,
            logprobs=logprobs,
            with_token_ids=self._body.return_token_ids,
        )
