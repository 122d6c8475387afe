"""``/v1/models``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from inferplane_server.service import Service

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The names that requests may use."""
    service = Service.of(request)
    return {"object": "list", "data": [_card(service, name) for name in service.model_names]}


@router.get("/v1/models/{name:path}")
async def retrieve_model(request: Request, name: str) -> dict[str, Any]:
    service = Service.of(request)
    return _card(service, service.check_model(name))


def _card(service: Service, name: str) -> dict[str, Any]:
    model = service.engine.config.model
    return {
        "id": name,
        "object": "model",
        "created": service.started_s,
        "owned_by": "inferplane",
        "root": model.model,
        "max_model_len": model.max_model_len,
        "tasks": list(model.tasks),
    }
