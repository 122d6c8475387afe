"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane_server.body import body_schema, read_body
from inferplane_server.errors import invalid
from inferplane_server.prompts import check_long_text
from inferplane_server.protocol.tokenize import DetokenizeRequest, TokenizeChatRequest, TokenizeRequest
from inferplane_server.service import Service

router = APIRouter(tags=["tokenizer"])


@router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """Token ids of a text or of a conversation, as a completion or a chat request would use them."""
    service = Service.of(request)
    service.lifecycle.check_ready()
    body = (await read_body(request, TokenizeRequest, service.settings.max_body_bytes)).root
    _check_model(service, body.model)
    if isinstance(body, TokenizeChatRequest):
        body.check_prompt()
        text = await service.chat_prompts.render(body)
    else:
        text = body.prompt
    check_long_text(service.engine, text)
    token_ids = await service.engine.encode_prompt(text, add_special_tokens=body.add_special_tokens)
    answer: dict[str, Any] = {
        "count": len(token_ids),
        "max_model_len": service.engine.config.model.max_model_len,
        "tokens": token_ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [service.token_texts.text_of(token_id) for token_id in token_ids]
    return Response(msgspec.json.encode(answer), media_type="application/json")


@router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    service = Service.of(request)
    service.lifecycle.check_ready()
    body = await read_body(request, DetokenizeRequest, service.settings.max_body_bytes)
    _check_model(service, body.model)
    vocab_size = service.engine.config.model.vocab_size
    for token_id in body.tokens:
        if not 0 <= token_id < vocab_size:
            raise invalid(
                f"tokens has {token_id}, but the vocabulary has tokens 0 to {vocab_size - 1}",
                "tokens",
                "invalid_value",
            )
    text = await asyncio.to_thread(service.engine.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return Response(msgspec.json.encode({"prompt": text}), media_type="application/json")


def _check_model(service: Service, name: str | None) -> None:
    """Here the name may be left out: there is one tokenizer."""
    if name is not None:
        service.check_model(name)
