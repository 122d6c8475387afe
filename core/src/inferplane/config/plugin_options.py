"""Settings that plugins declare through the ``engine_options`` hook."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from inferplane.config.engine import ConfigError

if TYPE_CHECKING:
    from inferplane.api.hookspecs import OptionSpec


def plugin_options(given: Mapping[str, Any], declared: Mapping[str, OptionSpec]) -> dict[str, Any]:
    """Every declared setting with the value that was given or its default.

    Raises `ConfigError` for a name that no installed plugin declares, or a value of the wrong kind.
    """
    if not isinstance(given, Mapping):
        raise ConfigError("plugin_options", f"plugin_options must map names to values, got {given!r}")
    if unknown := given.keys() - declared.keys():
        known = ", ".join(sorted(declared)) or "none"
        raise ConfigError(
            "plugin_options",
            f"no installed plugin has the options {', '.join(map(repr, sorted(unknown)))}; there are: {known}",
        )
    return {name: _checked(spec, given.get(name, spec.default)) for name, spec in declared.items()}


def _checked(spec: OptionSpec, value: Any) -> Any:
    if value is None:
        return spec.default
    if spec.kind is float and type(value) is int:
        value = float(value)
    if type(value) is not spec.kind:
        raise ConfigError(spec.name, f"{spec.name} must be of type {spec.kind.__name__}, got {value!r}")
    if spec.choices and value not in spec.choices:
        raise ConfigError(spec.name, f"{spec.name} must be one of {', '.join(spec.choices)}, got {value!r}")
    return value
