"""Runs the texts of one HTTP request on an engine that pools, all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from inferplane.api.engine import Engine
from inferplane.engine.output import RequestDelta
from inferplane.engine.pooling_output import cosine, decode_vector
from inferplane.request import PoolingParams
from inferplane_server.errors import engine_failure
from inferplane_server.metrics import ServerMetrics
from inferplane_server.prompts import check_long_text, check_prompt, encode_prompts
from inferplane_server.protocol.completions import RawPrompt

if TYPE_CHECKING:
    from inferplane.engine.pooling_output import Vector


@dataclass(frozen=True)
class PoolingPrompt:
    token_ids: list[int]
    second_text_start: int | None = None
    """Of a pair of texts, the first token of the second."""


@dataclass(frozen=True, kw_only=True)
class PoolingRequest:
    """What is to be pooled, whatever API asked for it."""

    id: str
    """Of the HTTP request; each prompt's engine request has its number appended."""
    params: PoolingParams
    priority: int = 0
    cache_salt: str | None = None


@dataclass(frozen=True)
class Pooled:
    """The answers, in the order of the prompts."""

    data: list[bytes]
    num_prompt_tokens: int

    @property
    def vectors(self) -> list[Vector]:
        return [decode_vector(each) for each in self.data]


async def pool(
    engine: Engine, metrics: ServerMetrics, request: PoolingRequest, prompts: Sequence[PoolingPrompt]
) -> Pooled:
    """Raises what the engine refuses a prompt with, or `ApiError` with status 500 when it fails one; the others then
    end with it, as they do when the caller leaves."""
    tasks = [
        asyncio.create_task(_pool_prompt(engine, metrics, request, f"{request.id}-{index}", prompt))
        for index, prompt in enumerate(prompts)
    ]
    try:
        deltas = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return Pooled([delta.pooled or b"" for delta in deltas], sum(delta.num_prompt_tokens for delta in deltas))


async def _pool_prompt(
    engine: Engine, metrics: ServerMetrics, request: PoolingRequest, request_id: str, prompt: PoolingPrompt
) -> RequestDelta:
    with metrics.pooling_meter(request.params.task) as meter:
        delta = await engine.pool(
            prompt.token_ids,
            request.params,
            request_id=request_id,
            second_text_start=prompt.second_text_start,
            priority=request.priority,
            cache_salt=request.cache_salt,
        )
        if delta.pooled is None:
            reason = next((each.error for each in delta.completions if each.error), "it was given up")
            raise engine_failure(reason, request_id)
        meter.finish(delta)
        return delta


async def encode_inputs(
    engine: Engine, inputs: Sequence[RawPrompt], *, lead: str = "", add_special_tokens: bool = True
) -> list[PoolingPrompt]:
    """Token ids of each text, with ``lead`` before it. Raises as `encode_prompts` does."""
    texts = [lead + each if isinstance(each, str) else each for each in inputs]
    encoded = await encode_prompts(engine, texts, add_special_tokens=add_special_tokens, max_tokens=0)
    return [PoolingPrompt(token_ids) for token_ids in encoded]


async def score_pairs(
    engine: Engine, metrics: ServerMetrics, request: PoolingRequest, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], int]:
    """A score for each pair, and the number of prompt tokens: by a cross-encoder, or by the cosine of two vectors."""
    pooler = engine.config.model.pooler
    assert pooler is not None, "the task was checked"
    if pooler.labels:
        prompts = await asyncio.to_thread(_encode_pairs, engine, pairs)
        pooled = await pool(engine, metrics, request, prompts)
        return [float(vector[0]) for vector in pooled.vectors], pooled.num_prompt_tokens
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    pooled = await pool(engine, metrics, request, await encode_inputs(engine, texts))
    found = dict(zip(texts, pooled.vectors))
    return [cosine(found[query], found[document]) for query, document in pairs], pooled.num_prompt_tokens


def _encode_pairs(engine: Engine, pairs: Sequence[tuple[str, str]]) -> list[PoolingPrompt]:
    model, prompts = engine.config.model, []
    for pair in pairs:
        for text in pair:
            check_long_text(engine, text, max_tokens=0)
        token_ids, start = engine.tokenizer.encode_pair(*pair)
        check_prompt(token_ids, model.vocab_size, model.max_model_len, 0)
        prompts.append(PoolingPrompt(token_ids, start))
    return prompts
