"""With a key set, every route but the named ones wants it, whatever way it is spelled."""

from __future__ import annotations

import logging

import pytest
from starlette.routing import Route

from http_answers import error_of
from inferplane_server.auth import OPEN_PATHS
from inferplane_server.settings import ServerSettings

KEY = "sk-very-secret-0123456789"


@pytest.fixture
def guarded(make_client):
    return make_client(api_keys=(KEY, "another"))


def _routes(client):
    for route in client.app.routes:
        # a router that was included may be kept whole, with its routes inside
        for leaf in getattr(route, "routes", None) or [route]:
            if isinstance(leaf, Route):
                yield leaf


async def test_every_route_of_the_app_is_guarded(guarded):
    paths = {
        *guarded.app.openapi()["paths"],
        *(route.path for route in _routes(guarded)),
        "/docs",
        "/openapi.json",
    }
    assert {"/v1/completions", "/v1/models", "/tokenize", "/version"} <= paths
    for path in paths - OPEN_PATHS:
        for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE"):
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": KEY},
                {"Authorization": f"Basic {KEY}"},
            ):
                response = await guarded.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, headers)
                if method != "HEAD":
                    error_of(response, 401, code="invalid_api_key")


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions/", "//v1/completions", "/v1//completions", "/v1/%63ompletions", "/V1/completions", "/health/",
        "/health/../v1/models", "//health", "/metrics/x", "/docs", "/openapi.json", "/redoc", "/nothing", "/",
    ],
)  # fmt: skip
async def test_other_spellings_are_guarded_too(guarded, path):
    for method in ("GET", "POST"):
        assert (await guarded.request(method, path)).status_code == 401


@pytest.mark.parametrize("path", sorted(OPEN_PATHS))
async def test_probes_need_no_key(guarded, path):
    assert (await guarded.get(path)).status_code == 200


@pytest.mark.parametrize("key", [KEY, "another"])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_any_of_the_keys_opens(guarded, key, scheme):
    response = await guarded.get("/v1/models", headers={"Authorization": f"{scheme} {key}"})
    assert response.status_code == 200


@pytest.mark.parametrize("key", ["", KEY[:-1], KEY + "x", KEY.upper(), "ключ"])
async def test_a_key_that_is_nearly_right_is_wrong(guarded, key):
    response = await guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}".encode()})
    error_of(response, 401)


async def test_a_websocket_is_closed(guarded):
    sent = []

    async def send(message):
        sent.append(message)

    scope = {"type": "websocket", "path": "/v1/models", "headers": [], "query_string": b""}
    await guarded.app(scope, None, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_the_key_is_in_no_log_and_no_repr(guarded, caplog):
    caplog.set_level(logging.DEBUG)
    for key in (KEY, "wrong-" + KEY):
        await guarded.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        await guarded.post("/v1/completions", content=b"{", headers={"Authorization": f"Bearer {key}"})
    assert KEY not in caplog.text
    assert KEY not in repr(ServerSettings(api_keys=(KEY,)))


async def test_browsers_of_allowed_origins_may_ask_first(make_client):
    client = make_client(api_keys=(KEY,), allow_origins=("https://app.example",))
    asking = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    response = await client.options("/v1/chat/completions", headers=asking)
    assert response.headers["access-control-allow-origin"] == "https://app.example"
    assert (await client.get("/v1/models", headers={"Origin": "https://app.example"})).status_code == 401
    other = await client.options("/v1/models", headers={**asking, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
