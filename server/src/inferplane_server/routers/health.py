"""``/health``, ``/metrics`` and ``/version``: what operators and probes ask."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from inferplane_server import metrics
from inferplane_server.service import Service

router = APIRouter(tags=["operation"])


@router.head("/health", include_in_schema=False)
@router.get("/health")
async def health(request: Request) -> Response:
    """200 when requests are served; 503 while starting, draining, or when the engine ended or hangs."""
    error = Service.of(request).lifecycle.why_unready()
    return error.response() if error else JSONResponse({"status": "ok"})


@router.get("/metrics")
async def read_metrics(request: Request) -> Response:
    """Prometheus text format."""
    return Response(Service.of(request).metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE})


@router.get("/version")
async def read_version() -> dict[str, str]:
    return {"version": version("inferplane")}
