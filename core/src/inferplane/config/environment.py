"""The registry of environment variables: every ``INFERPLANE_*`` name that any part of the project reads.

Read one with `environment(name)`; a name that is not declared here cannot be read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class EnvironmentVariable:
    name: str
    help: str
    """One sentence for the documentation: what it sets, and what holds without it."""


_DECLARED = (
    EnvironmentVariable(
        "INFERPLANE_API_KEY",
        "Key that requests to `inferplane serve` must carry, besides those of `--api-key`.",
    ),
    EnvironmentVariable(
        "INFERPLANE_CACHE", "Folder for what is fetched. Default: inferplane in the user's cache folder."
    ),
    EnvironmentVariable(
        "INFERPLANE_CPU_ISA",
        "Instructions that native CPU kernels use, by the names in `inferplane plugins doctor`; `none` does without "
        "them. Default: the best that the machine has.",
    ),
    EnvironmentVariable("INFERPLANE_DEVICE", "Platform to run on when `--device` is not given."),
    EnvironmentVariable(
        "INFERPLANE_PLUGINS",
        "Comma-separated names of plugins that must load; one that cannot ends the start with its cause.",
    ),
)

ENVIRONMENT: dict[str, EnvironmentVariable] = {variable.name: variable for variable in _DECLARED}
"""Every variable by name."""


def environment(name: str) -> str | None:
    """The value of a declared variable; None when it is unset or empty. Raises `KeyError` for any other name."""
    return os.environ.get(ENVIRONMENT[name].name) or None
