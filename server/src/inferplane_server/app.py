"""`create_app`: the ASGI application over one engine."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware

from inferplane.api.engine import Engine
from inferplane_server.auth import ApiKeyMiddleware
from inferplane_server.contributed import include_routers
from inferplane_server.errors import install_error_handlers
from inferplane_server.routers import chat, completions, health, models, pooling, tokenize
from inferplane_server.service import Service
from inferplane_server.settings import ServerSettings


def create_app(
    engine: Engine, settings: ServerSettings, routers: Mapping[str, APIRouter] | None = None
) -> FastAPI:
    """``routers`` are those that plugins bring, by name."""
    app = FastAPI(title="InferPlane", version=version("inferplane-server"), redirect_slashes=False)
    app.state.service = Service(engine, settings)
    modules = (models, completions, chat, pooling, tokenize, health)
    include_routers(app, {**{module.__name__: module.router for module in modules}, **(routers or {})})
    install_error_handlers(app)
    if settings.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys)
    if settings.allow_origins:
        # outside of the key check, since browsers send no key with the question whether they may send one
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allow_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app
