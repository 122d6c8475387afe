"""From ``"module:attribute"``, as hooks name what is imported only when used, to the thing itself."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from inferplane.plugins.record import PluginError, describe


def import_target(target: str, what: str) -> Any:
    """Raises `PluginError` naming ``target`` and ``what`` it was wanted for."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:
        raise PluginError(f"{what} is {target}, which cannot be imported: {describe(error)}") from error
