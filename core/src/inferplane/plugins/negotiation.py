"""Which plugins this core can serve, judged by the API version that they declare."""

from __future__ import annotations

import ast
import importlib.util
from typing import Any

from inferplane.api.manifest import API_VERSION, PREVIOUS_API_VERSION, PluginManifest


def format_version(api: tuple[int, int]) -> str:
    return f"{api[0]}.{api[1]}"


def supported_range() -> str:
    """The declared versions that work, in words."""
    return " or ".join(_minors(newest) for newest in (PREVIOUS_API_VERSION, API_VERSION))


def _minors(newest: tuple[int, int]) -> str:
    first, last = f"{newest[0]}.0", format_version(newest)
    return last if first == last else f"{first} to {last}"


def needs_adapter(api: tuple[int, int]) -> bool:
    """Whether a plugin that is served was written for the previous major."""
    return api[0] == PREVIOUS_API_VERSION[0]


def manifest_fault(manifest: Any, entry_point_name: str) -> str | None:
    """Why ``manifest`` says too little to go by; None when it is sound. The version itself is not judged here."""
    if manifest is None:
        return (
            "its module has no MANIFEST; a plugin declares "
            "MANIFEST = PluginManifest(name=…, api=(2, 0), provides=(…,))"
        )
    if not isinstance(manifest, PluginManifest):
        return f"its MANIFEST is a {type(manifest).__name__}, not an inferplane.api.PluginManifest"
    if not _is_version(manifest.api):
        return f"its MANIFEST declares api={manifest.api!r}; two integers are needed, as in (2, 0)"
    if not isinstance(manifest.provides, tuple) or not all(
        isinstance(part, str) for part in manifest.provides
    ):
        return f"its MANIFEST declares provides={manifest.provides!r}; a tuple of strings is needed"
    if manifest.name != entry_point_name:
        return f"its MANIFEST is named {manifest.name!r}, its entry point {entry_point_name!r}; the two must be equal"
    return None


def version_fault(api: tuple[int, int], distribution: str) -> str | None:
    """Why a plugin written for ``api`` is not served, with the command that mends it; None when it is served."""
    newest = {version[0]: version for version in (PREVIOUS_API_VERSION, API_VERSION)}
    if api[0] in newest and api <= newest[api[0]]:
        return None
    is_too_new = api[0] in newest or api > API_VERSION
    which, outdated = ("newer", "inferplane") if is_too_new else ("older", distribution)
    return (
        f"it was written for plugin API {format_version(api)}, which is {which} than this inferplane serves "
        f"(plugin API {format_version(API_VERSION)}; a plugin may declare {supported_range()}). "
        f"Mend it with: pip install --upgrade {outdated}"
    )


def declared_in_source(module_name: str) -> tuple[int, int] | None:
    """The API version in a plugin's source, read without running it; None where it is not written as a literal.

    A plugin for another API version may well fail to import, on a name that this version lacks. The reason
    worth telling is then the version.
    """
    try:
        spec = importlib.util.find_spec(module_name)
        source = getattr(spec.loader, "get_source")(module_name) if spec else None  # noqa: B009
        tree = ast.parse(source or "")
    except (
        Exception
    ):  # whatever the plugin's package does while it is looked up is no news: its import failed already
        return None
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        call = getattr(node, "value", None)
        if "MANIFEST" in names and isinstance(call, ast.Call):
            return _literal_api(call)
    return None


def _literal_api(call: ast.Call) -> tuple[int, int] | None:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "api"] or call.args[1:2]
    try:
        api = ast.literal_eval(given[0])
    except (IndexError, ValueError):
        return None
    return api if _is_version(api) else None


def _is_version(api: Any) -> bool:
    return isinstance(api, tuple) and len(api) == 2 and all(type(part) is int and part >= 0 for part in api)
