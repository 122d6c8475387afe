"""Layers: what models are made of. Each knows its checkpoint tensors, its share of them, and who computes."""

from inferplane.layers.activation import GatedActivation
from inferplane.layers.attention import Attention
from inferplane.layers.block import MixerBlock, ParallelBlock, PostNormBlock, SequentialBlock
from inferplane.layers.classification import ClassificationHead
from inferplane.layers.delta_net import DeltaHeads, GatedDeltaNet
from inferplane.layers.embedding import ParallelLMHead, PositionEmbedding, VocabParallelEmbedding
from inferplane.layers.encoder_attention import EncoderAttention
from inferplane.layers.experts import Experts, SeparateExperts, StackedExperts
from inferplane.layers.latent_attention import LatentAttention, LatentShape
from inferplane.layers.layer import Layer, WeightSlot, walk_layers
from inferplane.layers.linear import (
    ColumnParallelLinear,
    Linear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from inferplane.layers.mlp import MLP, GatedMLP
from inferplane.layers.moe import SparseMoE
from inferplane.layers.norm import AllHeadsRMSNorm, LayerNorm, Norm, RMSNorm
from inferplane.layers.qkv import FusedQKV, Heads, QKVParallelLinear, SeparateQKV
from inferplane.layers.rope import RotaryEmbedding
from inferplane.layers.router import Router, Routing
from inferplane.layers.selective_scan import SelectiveScanMixer, SelectiveShape
from inferplane.layers.self_attention import SelfAttention
from inferplane.layers.short_conv import ShortConvolution
from inferplane.layers.ssm import StateSpaceMixer
from inferplane.layers.state_mixer import CausalConvolution, StateMixer

__all__ = [
    "AllHeadsRMSNorm",
    "Attention",
    "CausalConvolution",
    "ClassificationHead",
    "ColumnParallelLinear",
    "DeltaHeads",
    "EncoderAttention",
    "Experts",
    "FusedQKV",
    "GatedActivation",
    "GatedDeltaNet",
    "GatedMLP",
    "Heads",
    "LatentAttention",
    "LatentShape",
    "Layer",
    "LayerNorm",
    "Linear",
    "MLP",
    "MixerBlock",
    "MergedColumnParallelLinear",
    "Norm",
    "ParallelBlock",
    "ParallelLMHead",
    "PositionEmbedding",
    "PostNormBlock",
    "QKVParallelLinear",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "Router",
    "Routing",
    "RowParallelLinear",
    "SelectiveScanMixer",
    "SelectiveShape",
    "SelfAttention",
    "SeparateExperts",
    "SeparateQKV",
    "SequentialBlock",
    "SparseMoE",
    "ShortConvolution",
    "StackedExperts",
    "StateMixer",
    "StateSpaceMixer",
    "VocabParallelEmbedding",
    "WeightSlot",
    "walk_layers",
]
