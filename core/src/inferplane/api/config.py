"""Configuration types for plugins."""

from inferplane.config import ConfigError, EngineArgs, EngineConfig

__all__ = ["ConfigError", "EngineArgs", "EngineConfig"]
