"""``/v1/completions``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane.engine.output import CompletionDelta
from inferplane.request import PositionLogprobs
from inferplane_server.body import body_schema
from inferplane_server.chunks import ChunkFrame, encode_choice, is_shown
from inferplane_server.generation import (
    Choice,
    Collected,
    GenerationRequest,
    PromptDelta,
    Usage,
    stream,
)
from inferplane_server.job import Job, answer
from inferplane_server.logprobs import CompletionLogprobs, join_layouts, prompt_logprobs_by_id
from inferplane_server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest, RawPrompt
from inferplane_server.service import Service
from inferplane_server.sse import encode_json

router = APIRouter(tags=["completions"])

PromptPositions = list[PositionLogprobs | None]


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest))
async def create_completion(request: Request) -> Response:
    """Continues one or more prompts; as server-sent events when ``stream`` is true."""
    return await answer(request, CompletionRequest, CompletionJob)


class CompletionJob(Job[CompletionRequest]):
    """One completion request on its way from prompts to a response."""

    def __init__(self, service: Service, body: CompletionRequest, model: str) -> None:
        super().__init__(service, body, model, id_prefix="cmpl", kind="text_completion")
        self._echoes_logprobs = body.echo and body.logprobs is not None
        self._skips_special = body.skip_special_tokens is not False

    @property
    def _max_tokens(self) -> int | None:
        return DEFAULT_MAX_TOKENS if self._body.max_tokens is None else self._body.max_tokens

    @property
    def _logprobs_wanted(self) -> dict[str, Any]:
        body = self._body
        wanted = {"logprobs": body.logprobs}
        if self._echoes_logprobs:
            wanted["prompt_logprobs"] = max(body.logprobs or 0, body.prompt_logprobs or 0)
        return wanted

    async def _prompts(self) -> Sequence[RawPrompt]:
        return self._body.prompts

    def _choices(self, generation: GenerationRequest, collected: Collected) -> list[dict[str, Any]]:
        return [
            self._choice(index, choice, generation, collected)
            for index, choice in enumerate(collected.choices)
        ]

    def _echo_text(self, prompt_index: int, token_ids: list[int]) -> str:
        prompt = self._body.prompts[prompt_index]
        if isinstance(prompt, str):
            return prompt
        return self._service.engine.tokenizer.decode(token_ids, skip_special_tokens=self._skips_special)

    def _new_logprobs(self) -> CompletionLogprobs:
        return CompletionLogprobs(
            self._service.token_texts, self._body.logprobs or 0, skip_special_tokens=self._skips_special
        )

    def _choice(
        self, index: int, choice: Choice, generation: GenerationRequest, collected: Collected
    ) -> dict[str, Any]:
        body, prompt_index = self._body, index // generation.params.n
        token_ids, positions = generation.prompts[prompt_index], collected.prompt_logprobs[prompt_index]
        logprobs = None
        if body.logprobs is not None:
            layout = self._new_logprobs()
            parts = [layout.of_prompt(token_ids, positions)] if self._echoes_logprobs and positions else []
            logprobs = join_layouts([*parts, layout.of_output(choice.logprobs)])
        answer: dict[str, Any] = {
            "index": index,
            "text": (self._echo_text(prompt_index, token_ids) if body.echo else "") + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **({"token_ids": choice.token_ids} if body.return_token_ids else {}),
        }
        if body.prompt_logprobs is not None and positions is not None:
            answer["prompt_logprobs"] = prompt_logprobs_by_id(positions, self._service.token_texts)
        return answer

    async def _events(self, generation: GenerationRequest) -> AsyncGenerator[bytes, None]:
        usage = Usage()
        frame = ChunkFrame(self._header, self._body.stream_options, usage)
        choices: dict[int, ChoiceStream] = {}
        echoes = EchoOrder(needs_logprobs=self._echoes_logprobs)
        async with aclosing(stream(self._service.engine, self._service.metrics, generation)) as batches:
            async for batch in batches:
                out = b""
                for item in echoes.release(batch):
                    usage.add(item)
                    for completion in item.delta.completions:
                        index = item.prompt_index * generation.params.n + completion.index
                        if index not in choices:
                            choices[index] = ChoiceStream(index, self._body, self._new_logprobs())
                            out += self._echo_chunk(
                                frame, choices[index], item.prompt_index, generation, echoes
                            )
                        if is_shown(completion) or self._body.return_token_ids:
                            out += frame.chunk(choices[index].chunk(completion))
                if out:
                    yield out
        yield frame.end()

    def _echo_chunk(
        self,
        frame: ChunkFrame,
        choice: ChoiceStream,
        prompt_index: int,
        generation: GenerationRequest,
        echoes: EchoOrder,
    ) -> bytes:
        """The prompt as the first chunk of a choice, if it is to be echoed."""
        if not self._body.echo:
            return b""
        token_ids = generation.prompts[prompt_index]
        return frame.chunk(
            choice.echo(
                self._echo_text(prompt_index, token_ids), token_ids, echoes.positions.get(prompt_index)
            )
        )


class EchoOrder:
    """Holds back what comes of a prompt before the prompt's log-probabilities, which its echo needs first.

    They come with one completion of the prompt, and others may be ahead of it.
    """

    def __init__(self, *, needs_logprobs: bool) -> None:
        self.positions: dict[int, PromptPositions] = {}
        self._needs_logprobs = needs_logprobs
        self._held: dict[int, list[PromptDelta]] = {}

    def release(self, batch: list[PromptDelta]) -> list[PromptDelta]:
        """What may be sent now, in order."""
        if not self._needs_logprobs:
            return batch
        released: list[PromptDelta] = []
        for item in batch:
            index = item.prompt_index
            if item.delta.prompt_logprobs is not None:
                self.positions[index] = item.delta.prompt_logprobs
            if index in self.positions:
                released += [*self._held.pop(index, ()), item]
            else:
                self._held.setdefault(index, []).append(item)
        return released


class ChoiceStream:
    """One choice of a stream: its number and the running offset of its log-probabilities."""

    def __init__(self, index: int, body: CompletionRequest, layout: CompletionLogprobs) -> None:
        self._index = index
        self._with_logprobs = body.logprobs is not None
        self._with_token_ids = body.return_token_ids
        self._layout = layout

    def echo(self, text: str, token_ids: list[int], positions: PromptPositions | None) -> bytes:
        logprobs = b"null" if positions is None else encode_json(self._layout.of_prompt(token_ids, positions))
        return encode_choice(
            self._index,
            b'"text":' + encode_json(text),
            CompletionDelta(self._index, text, []),
            logprobs=logprobs,
        )

    def chunk(self, completion: CompletionDelta) -> bytes:
        logprobs = b"null"
        if self._with_logprobs and completion.logprobs:
            logprobs = encode_json(self._layout.of_output(completion.logprobs))
        return encode_choice(
            self._index,
            b'"text":' + encode_json(completion.text),
            completion,
            logprobs=logprobs,
            with_token_ids=self._with_token_ids,
        )
