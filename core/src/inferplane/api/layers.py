"""Layers and weight loading for models that a plugin brings. Importing it imports torch."""

from inferplane.layers import (
    Attention,
    ColumnParallelLinear,
    GatedActivation,
    GatedMLP,
    Layer,
    Linear,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    WeightSlot,
    walk_layers,
)
from inferplane.models.errors import ModelLoadError
from inferplane.models.rope_config import RopeConfig, rope_config
from inferplane.models.weights import load_weights

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "GatedActivation",
    "GatedMLP",
    "Layer",
    "Linear",
    "MergedColumnParallelLinear",
    "ModelLoadError",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RopeConfig",
    "RotaryEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "WeightSlot",
    "load_weights",
    "rope_config",
    "walk_layers",
]
