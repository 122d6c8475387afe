"""Whether a library written in the CuTe DSL is installed, told from files: importing one takes seconds."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from importlib.machinery import PathFinder
from typing import TypeVar

Library = TypeVar("Library")

CUTE = "nvidia-cutlass-dsl"


def missing_package(library: str, package: str) -> str | None:
    """``package`` if it does not bring the module ``library``, or else the DSL's if that is not installed; None when
    both are."""
    needed = {library: package, "cutlass.cute": CUTE}
    return next((package for module, package in needed.items() if not _is_there(module)), None)


def import_or_warn(
    name: str, load: Callable[[], Library], logger: logging.Logger, without: str
) -> Library | None:
    """What ``load`` imports; None where that fails, and a warning that says what happens ``without`` it."""
    try:
        return load()
    except Exception as error:  # a broken installation may raise anything
        logger.warning("%s cannot be imported (%s: %s): %s", name, type(error).__name__, error, without)
        return None


def _is_there(module: str) -> bool:
    """Nothing is imported. Older packages of the same name lack the part behind the dot."""
    package, part = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    folders = spec.submodule_search_locations if spec is not None else None
    return folders is not None and PathFinder.find_spec(f"{package}.{part}", list(folders)) is not None
