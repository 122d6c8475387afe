"""Configuration: one flat `EngineArgs` as the user writes it, one frozen `EngineConfig` as the engine reads it."""

from inferplane.config.args import EngineArgs
from inferplane.config.engine import (
    CacheConfig,
    ConfigError,
    DeviceConfig,
    EngineConfig,
    GraphConfig,
    LoadConfig,
    ModelConfig,
    ParallelConfig,
    PoolerConfig,
    SchedulerConfig,
)

__all__ = [
    "CacheConfig",
    "ConfigError",
    "DeviceConfig",
    "EngineArgs",
    "EngineConfig",
    "GraphConfig",
    "LoadConfig",
    "ModelConfig",
    "ParallelConfig",
    "PoolerConfig",
    "SchedulerConfig",
]
