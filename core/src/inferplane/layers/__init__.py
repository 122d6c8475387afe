"""Layers: what models are made of. Each knows its checkpoint tensors, its share of them, and who computes."""

from inferplane.layers.activation import GatedActivation
from inferplane.layers.attention import Attention
from inferplane.layers.block import ParallelBlock, SequentialBlock
from inferplane.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from inferplane.layers.experts import Experts, SeparateExperts, StackedExperts
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
from inferplane.layers.moe import SparseMoE
from inferplane.layers.norm import LayerNorm, Norm, RMSNorm
from inferplane.layers.rope import RotaryEmbedding
from inferplane.layers.router import Router, Routing
from inferplane.layers.self_attention import Heads, SelfAttention

__all__ = [
    "Attention",
    "ColumnParallelLinear",
    "Experts",
    "GatedActivation",
    "GatedMLP",
    "Heads",
    "Layer",
    "LayerNorm",
    "Linear",
    "MergedColumnParallelLinear",
    "Norm",
    "ParallelBlock",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "RowParallelLinear",
    "SelfAttention",
    "SeparateExperts",
    "SequentialBlock",
    "SparseMoE",
    "StackedExperts",
    "VocabParallelEmbedding",
    "WeightSlot",
    "walk_layers",
]
