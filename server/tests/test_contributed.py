"""Routes of plugins: guarded like the server's own, over the same engine, and never in place of one of them."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from inferplane.plugins import PluginError
from inferplane_server.app import create_app
from inferplane_server.contributed import contributed_routers
from inferplane_server.settings import ServerSettings
from scripted_engine import ScriptedEngine
from toy_plugins import ToyIndex

PLUGIN = """
from inferplane.api import *
MANIFEST = PluginManifest(name={name!r}, api=API_VERSION, provides=("endpoints",))
def routes(engine):
    from fastapi import APIRouter
    router = APIRouter()
    @router.get({path!r})
    async def length():
        return {{"max_model_len": engine.config.model.max_model_len}}
    return router
@hookimpl
def endpoints(): return [{target}]
"""


def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, target: str = '__name__ + ":routes"'
) -> None:
    toys = ToyIndex(tmp_path, monkeypatch)
    toys.install("toy", PLUGIN.format(name="toy", path=path, target=target))


async def test_a_route_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "/toy/length")
    engine = ScriptedEngine()
    app = create_app(engine, ServerSettings(api_keys=("k",)), contributed_routers(engine))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.get("/toy/length")).status_code == 401
        answer = await client.get("/toy/length", headers={"Authorization": "Bearer k"})
    assert answer.json() == {"max_model_len": engine.config.model.max_model_len}


@pytest.mark.parametrize(
    ("path", "target", "message"),
    [
        (
            "/v1/models",
            '__name__ + ":routes"',
            r"brings a route for /v1/models, which inferplane_server.routers.models has already",
        ),
        ("/toy", '"json:dumps"', "json:dumps is offered as an endpoint, but makes"),
        ("/toy", '"nowhere:routes"', "an endpoint is nowhere:routes, which cannot be imported"),
    ],
)
def test_a_route_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, target: str, message: str
) -> None:
    install(tmp_path, monkeypatch, path, target)
    monkeypatch.setattr("json.dumps", lambda engine: "text")
    engine = ScriptedEngine()
    with pytest.raises(PluginError, match=message):
        create_app(engine, ServerSettings(), contributed_routers(engine))


def test_two_plugins_of_one_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toys = ToyIndex(tmp_path, monkeypatch)
    for name in ("one", "two"):
        toys.install(name, PLUGIN.format(name=name, path="/toy", target='__name__ + ":routes"'))
    engine = ScriptedEngine()
    with pytest.raises(PluginError, match=r"toy_two_module:routes brings.*which toy_one_module:routes has"):
        create_app(engine, ServerSettings(), contributed_routers(engine))
