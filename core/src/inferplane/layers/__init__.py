"""Layers: what models are made of. Each knows its checkpoint tensors, its share of them, and who computes."""

from inferplane.layers.activation import GatedActivation
from inferplane.layers.attention import Attention
from inferplane.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from inferplane.layers.layer import Layer, WeightSlot, walk_layers
from inferplane.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from inferplane.layers.mlp import GatedMLP
from inferplane.layers.norm import RMSNorm
from inferplane.layers.rope import RotaryEmbedding

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "GatedActivation",
    "GatedMLP",
    "Layer",
    "Linear",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "WeightSlot",
    "walk_layers",
]
