"""Runs the prompts of one HTTP request on the engine: as one stream of deltas, or collected to their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from inferplane.api.engine import Engine
from inferplane.engine.output import CompletionDelta, RequestDelta
from inferplane.request import FinishReason, PositionLogprobs, SamplingParams
from inferplane_server.errors import engine_failure
from inferplane_server.metrics import ServerMetrics

_FAILURES = (FinishReason.ERROR, FinishReason.ABORT)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """What is to be generated, whatever API asked for it."""

    id: str
    """Of the HTTP request; each prompt's engine request has its number appended."""
    prompts: Sequence[list[int]]
    params: SamplingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class PromptDelta:
    prompt_index: int
    delta: RequestDelta


Batch = list[PromptDelta]
"""Everything that was ready at one moment."""


@dataclass
class Choice:
    """One completion, collected to its end."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class Usage:
    """Counts each prompt once, however many completions it has."""

    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, item: PromptDelta) -> None:
        if item.prompt_index not in self._seen:
            self._seen.add(item.prompt_index)
            self.num_prompt_tokens += item.delta.num_prompt_tokens
            self.num_cached_tokens += item.delta.num_cached_tokens
        for completion in item.delta.completions:
            self.num_output_tokens += len(completion.token_ids)

    def as_dict(self) -> dict[str, object]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


async def stream_prompt(
    engine: Engine, metrics: ServerMetrics, request: GenerationRequest, index: int
) -> AsyncGenerator[RequestDelta, None]:
    """One prompt. Raises `ApiError` with status 500 when the engine fails it; a caller who closes early aborts it."""
    request_id = f"{request.id}-{index}"
    meter = metrics.meter()
    deltas = engine.generate(
        request.prompts[index],
        request.params,
        request_id=request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                for completion in delta.completions:
                    if completion.finish_reason is not None and completion.finish_reason in _FAILURES:
                        raise engine_failure(completion.error or "it was given up", request_id)
                meter.observe(delta)
                yield delta
    except (GeneratorExit, asyncio.CancelledError):
        meter.abort()
        raise
    except Exception:
        meter.fail()
        raise


async def stream(
    engine: Engine, metrics: ServerMetrics, request: GenerationRequest
) -> AsyncGenerator[Batch, None]:
    """All prompts at once, as their deltas come; whatever is ready comes in one batch."""
    if len(request.prompts) == 1:
        async with aclosing(stream_prompt(engine, metrics, request, 0)) as deltas:
            async for delta in deltas:
                yield [PromptDelta(0, delta)]
        return
    ready: Batch = []
    something_ready = asyncio.Event()

    async def pump(index: int) -> None:
        async with aclosing(stream_prompt(engine, metrics, request, index)) as deltas:
            async for delta in deltas:
                ready.append(PromptDelta(index, delta))
                something_ready.set()

    pumps = [asyncio.create_task(pump(index)) for index in range(len(request.prompts))]
    for task in pumps:
        task.add_done_callback(lambda _: something_ready.set())
    try:
        running = set(pumps)
        while running or ready:
            await something_ready.wait()
            something_ready.clear()
            ended = {task for task in running if task.done()}
            running -= ended
            for task in ended:
                task.result()
            if ready:
                batch, ready[:] = ready[:], []
                yield batch
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


@dataclass
class Collected:
    """Everything that a request produced. Choice ``prompt_index * n + i`` is the i-th completion of a prompt."""

    choices: list[Choice]
    usage: Usage
    prompt_logprobs: list[list[PositionLogprobs | None] | None]
    """For each prompt, when asked for."""


async def collect(engine: Engine, metrics: ServerMetrics, request: GenerationRequest) -> Collected:
    n = request.params.n
    collected = Collected(
        [Choice() for _ in range(n * len(request.prompts))], Usage(), [None] * len(request.prompts)
    )
    async with aclosing(stream(engine, metrics, request)) as batches:
        async for batch in batches:
            for item in batch:
                collected.usage.add(item)
                if item.delta.prompt_logprobs is not None:
                    collected.prompt_logprobs[item.prompt_index] = item.delta.prompt_logprobs
                for completion in item.delta.completions:
                    _extend(collected.choices[item.prompt_index * n + completion.index], completion)
    return collected


def _extend(choice: Choice, delta: CompletionDelta) -> None:
    choice.text += delta.text
    choice.token_ids += delta.token_ids
    choice.logprobs += delta.logprobs or ()
    if delta.finish_reason is not None:
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
