"""Configuration types for plugins."""

from inferplane.config import ConfigError, EngineArgs, EngineConfig
from inferplane.config.defaults import ConfigPatch

__all__ = ["ConfigError", "ConfigPatch", "EngineArgs", "EngineConfig"]
