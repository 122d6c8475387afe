"""What a plugin says of itself before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass

API_VERSION = (2, 0)
"""(major, minor) of `inferplane.api`. A minor adds, a major may take away."""

PREVIOUS_API_VERSION: tuple[int, int] = (1, 0)
"""The last version of the major before, whose plugins are served through an adapter."""


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
