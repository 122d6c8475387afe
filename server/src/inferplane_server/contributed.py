"""Routes that plugins bring through the ``endpoints`` hook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastapi import APIRouter, FastAPI
from starlette.routing import BaseRoute, Route

from inferplane.api.engine import Engine
from inferplane.plugins import PluginError, load_plugins
from inferplane.plugins.target import import_target


def contributed_routers(engine: Engine) -> dict[str, APIRouter]:
    """By the target that makes each. Raises `PluginError` for one that cannot be imported or makes no router."""
    routers = {}
    for target in load_plugins(quiet=True).endpoints():
        router = import_target(target, "an endpoint")(engine)
        if not isinstance(router, APIRouter):
            raise PluginError(
                f"{target} is offered as an endpoint, but makes {router!r}, not a fastapi.APIRouter"
            )
        routers[target] = router
    return routers


def include_routers(app: FastAPI, routers: Mapping[str, APIRouter]) -> None:
    """Adds routers, each by the name of who brings it. Raises `PluginError` for a path that two of them bring."""
    owners = dict.fromkeys(_paths(app.routes), "the server")
    for owner, router in routers.items():
        paths = _paths(router.routes)
        if taken := sorted(paths & owners.keys()):
            raise PluginError(f"{owner} brings a route for {taken[0]}, which {owners[taken[0]]} has already")
        owners |= dict.fromkeys(paths, owner)
        app.include_router(router)


def _paths(routes: Iterable[BaseRoute]) -> set[str]:
    return {route.path for route in routes if isinstance(route, Route)}
