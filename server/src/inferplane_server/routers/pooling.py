"""``/v1/embeddings``, ``/classify``, ``/score`` and ``/rerank``."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane.engine.errors import PromptError
from inferplane.engine.pooling_input import check_pooling, leading_text, text_pairs
from inferplane.engine.pooling_output import decode_vector
from inferplane.request import PoolingParams, PoolingTask
from inferplane_server.body import body_schema, read_body
from inferplane_server.connection import BoundToCaller
from inferplane_server.errors import as_api_error, invalid
from inferplane_server.pooling import PoolingRequest, encode_inputs, pool, score_pairs
from inferplane_server.protocol.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from inferplane_server.service import Service, new_id
from inferplane_server.sse import encode_json

router = APIRouter(tags=["pooling"])
Body = TypeVar("Body", bound=PoolingFields)
Answer = dict[str, Any]
LARGE_ANSWER_BYTES = 1 << 18
"""Of vectors: from here on it takes milliseconds to write them as text, which other requests should not wait for."""


@router.post("/v1/embeddings", openapi_extra=body_schema(EmbeddingRequest))
async def create_embeddings(request: Request) -> Response:
    """A vector for each text, as numbers or in base64."""
    return await _answer(request, EmbeddingRequest, "input", _embed)


@router.post("/classify", openapi_extra=body_schema(ClassifyRequest))
async def classify(request: Request) -> Response:
    """The probability of each class for each text."""
    return await _answer(request, ClassifyRequest, "input", _classify)


@router.post("/score", openapi_extra=body_schema(ScoreRequest))
@router.post("/v1/score", openapi_extra=body_schema(ScoreRequest))
async def score(request: Request) -> Response:
    """A score for each pair of texts."""
    return await _answer(request, ScoreRequest, "text_1", _score)


@router.post("/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/v1/rerank", openapi_extra=body_schema(RerankRequest))
@router.post("/v2/rerank", openapi_extra=body_schema(RerankRequest))
async def rerank(request: Request) -> Response:
    """Documents by how well they answer a query, best first."""
    return await _answer(request, RerankRequest, "documents", _rerank)


async def _answer(
    request: Request, body_type: type[Body], param: str, make: Callable[[Service, Body], Awaitable[Answer]]
) -> Response:
    """What all routes do. ``param`` is the field that a text which cannot be read came in."""
    service = Service.of(request)
    service.lifecycle.check_ready()
    body = await read_body(request, body_type, service.settings.max_body_bytes)
    service.check_model(body.model)

    async def respond() -> Response:
        try:
            answer = await make(service, body)
        except PromptError as error:
            raise invalid(str(error), param, as_api_error(error).code) from None
        return Response(await _encode(answer), media_type="application/json")

    return BoundToCaller(service.lifecycle, respond)


async def _encode(answer: Answer) -> bytes:
    data = answer.get("data", ())
    size = sum(len(each["embedding"]) for each in data if isinstance(each.get("embedding"), bytes))

    def as_text() -> bytes:
        for each in data:
            if isinstance(each.get("embedding"), bytes):
                each["embedding"] = decode_vector(each["embedding"]).tolist()
        return encode_json(answer)

    return as_text() if size < LARGE_ANSWER_BYTES else await asyncio.to_thread(as_text)


def _request(service: Service, kind: str, body: PoolingFields, **params: Any) -> PoolingRequest:
    """Raises `TaskError` and `ParameterError` for what the model cannot do."""
    asked = PoolingParams(**params)
    check_pooling(service.engine.config.model.pooler, asked)
    return PoolingRequest(id=new_id(kind), params=asked, priority=body.priority, cache_salt=body.cache_salt)


def _header(request: PoolingRequest, body: PoolingFields) -> Answer:
    return {"id": request.id, "object": "list", "created": int(time.time()), "model": body.model}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


async def _embed(service: Service, body: EmbeddingRequest) -> Answer:
    engine = service.engine
    request = _request(
        service,
        "embd",
        body,
        task=PoolingTask.EMBED,
        dimensions=body.dimensions,
        normalize=body.normalize,
    )
    lead = leading_text(engine.config.model.pooler, body.prompt_name)
    prompts = await encode_inputs(engine, body.input, lead=lead, add_special_tokens=body.add_special_tokens)
    pooled = await pool(engine, service.metrics, request, prompts)
    is_text = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(each).decode() if is_text else each,
        }
        for index, each in enumerate(pooled.data)
    ]
    return {**_header(request, body), "data": data, "usage": _usage(pooled.num_prompt_tokens)}


async def _classify(service: Service, body: ClassifyRequest) -> Answer:
    engine, pooler = service.engine, service.engine.config.model.pooler
    request = _request(
        service, "classify", body, task=PoolingTask.CLASSIFY, use_activation=body.use_activation
    )
    prompts = await encode_inputs(engine, body.input, add_special_tokens=body.add_special_tokens)
    pooled = await pool(engine, service.metrics, request, prompts)
    labels = pooler.labels if pooler is not None else ()
    data = [
        {
            "index": index,
            "label": labels[int(vector.argmax())],
            "probs": vector.tolist(),
            "num_classes": len(vector),
        }
        for index, vector in enumerate(pooled.vectors)
    ]
    return {**_header(request, body), "data": data, "usage": _usage(pooled.num_prompt_tokens)}


async def _score(service: Service, body: ScoreRequest) -> Answer:
    request = _request(service, "score", body, task=PoolingTask.SCORE, use_activation=body.use_activation)
    try:
        pairs = text_pairs(*body.pairs())
    except ValueError as error:
        raise invalid(str(error), "text_1", "invalid_value") from None
    scores, num_tokens = await score_pairs(service.engine, service.metrics, request, pairs)
    data = [{"index": index, "object": "score", "score": each} for index, each in enumerate(scores)]
    return {**_header(request, body), "data": data, "usage": _usage(num_tokens)}


async def _rerank(service: Service, body: RerankRequest) -> Answer:
    request = _request(service, "rerank", body, task=PoolingTask.SCORE, use_activation=body.use_activation)
    pairs = [(body.query, document) for document in body.documents]
    scores, num_tokens = await score_pairs(service.engine, service.metrics, request, pairs)
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[Answer] = [{"index": index, "relevance_score": scores[index]} for index in best_first]
    if body.return_documents:
        for each in results:
            each["document"] = {"text": body.documents[each["index"]]}
    return {"id": request.id, "model": body.model, "results": results, "usage": _usage(num_tokens)}
