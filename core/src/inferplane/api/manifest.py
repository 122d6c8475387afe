"""What a plugin says of itself before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

API_VERSION = (1, 0)
"""(major, minor) of `inferplane.api`. A minor adds, a major may take away."""

SUPPORTED_MAJORS = (1,)


@dataclass(frozen=True)
class PluginManifest:
    """Module attribute ``MANIFEST`` of the module that an ``inferplane.plugins`` entry point names.

    That module must import in milliseconds: no torch, no vendor library. Heavy imports belong inside its hooks.
    """

    name: str
    api: tuple[int, int]
    """The API version that the plugin was written for."""
    provides: tuple[str, ...]
    """For people: ``platform``, ``server``, ``models``, …"""
