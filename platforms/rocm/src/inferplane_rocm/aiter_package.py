"""Whether AITER is there, and new enough. It is not imported: that compiles and probes."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

LEAST_VERSION = (0, 1, 5)
"""Older ones have another signature."""


def why_no_aiter() -> str | None:
    """None where it is installed and new enough. Asked of its metadata: another package imports under the same name."""
    try:
        found = version("amd-aiter")
    except PackageNotFoundError:
        return "the package amd-aiter is not installed"
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if numbers < LEAST_VERSION:
        return f"amd-aiter {found} is installed; at least {'.'.join(map(str, LEAST_VERSION))} is needed"
    return None
