"""`create_app`: the ASGI application over one engine."""

from __future__ import annotations

from importlib.metadata import version

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from inferplane_server.auth import ApiKeyMiddleware
from inferplane_server.engine_protocol import Engine
from inferplane_server.errors import install_error_handlers
from inferplane_server.routers import chat, completions, health, models, tokenize, unsupported
from inferplane_server.service import Service
from inferplane_server.settings import ServerSettings


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    app = FastAPI(title="InferPlane", version=version("inferplane-server"), redirect_slashes=False)
    app.state.service = Service(engine, settings)
    for module in (models, completions, chat, tokenize, health, unsupported):
        app.include_router(module.router)
    install_error_handlers(app)
    if settings.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=settings.api_keys)
    if settings.allow_origins:
        # outside of the key check, since browsers send no key with the question whether they may send one
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.allow_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app
