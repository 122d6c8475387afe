"""Routes of the OpenAI API that clients may try and that are answered with a reason instead of a bare 404."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from inferplane_server.body import read_body
from inferplane_server.errors import invalid
from inferplane_server.protocol.base import AnyRequest
from inferplane_server.service import Service

router = APIRouter(include_in_schema=False)


@router.post("/v1/embeddings")
async def create_embeddings(request: Request) -> Response:
    service = Service.of(request)
    body = await read_body(request, AnyRequest, service.settings.max_body_bytes)
    model = service.check_model(body.model)
    raise invalid(
        f"The model '{model}' generates text; it does not make embeddings.", "model", "unsupported_endpoint"
    )
