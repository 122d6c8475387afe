"""ModernBERT: rotary positions, gated feed-forward, and windows in most layers (arXiv:2412.13663)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from inferplane.api.model import ForwardBatch
from inferplane.layers import (
    ClassificationHead,
    FusedQKV,
    GatedMLP,
    Layer,
    LayerNorm,
    RotaryEmbedding,
    SequentialBlock,
    VocabParallelEmbedding,
)
from inferplane.models.encoder import Encoder
from inferplane.models.hf_fields import flag, text, whole_number
from inferplane.models.rope_config import rope_config
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import FULL, SLIDING, layer_type


class ModernBertModel(Encoder):
    root = "model."
    unused: ClassVar[tuple[str, ...]] = ("head.", "decoder.")

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(
            hf, eps_key="norm_eps", eps=1e-5, activation_key="hidden_activation", activation="gelu"
        )

    def make_embeddings(self) -> None:
        self.words = VocabParallelEmbedding(
            self.ctx, "embeddings.tok_embeddings", self.shape.vocab_size, self.shape.hidden_size
        )
        self.embedding_norm = self.norm("embeddings.norm")
        self._ropes: dict[str, RotaryEmbedding] = {}

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self.embedding_norm(self.words(batch.token_ids))

    def make_block(self, index: int) -> Layer:
        prefix, shape, kind = f"layers.{index}", self.shape, self._layer_type(index)
        bias = flag(self.hf, "attention_bias")
        half_window = whole_number(self.hf, "local_attention", 128) // 2
        return SequentialBlock(
            attention_norm=self.norm(f"{prefix}.attn_norm") if index else None,
            attention=self.self_attention(
                f"{prefix}.attn",
                tensors=FusedQKV("Wqkv"),
                output="Wo",
                qkv_bias=bias,
                output_bias=bias,
                rope=self._rope(kind),
                window=half_window if kind == SLIDING else None,
            ),
            mlp_norm=self.norm(f"{prefix}.mlp_norm"),
            mlp=GatedMLP(
                self.ctx,
                f"{prefix}.mlp",
                shape.hidden_size,
                shape.intermediate_size,
                bias=flag(self.hf, "mlp_bias"),
                activation=shape.activation,
                fused_name="Wi",
                down_name="Wo",
            ),
        )

    def make_last_norm(self) -> LayerNorm:
        return self.norm("final_norm")

    def norm(self, prefix: str) -> LayerNorm:
        return self.layer_norm(prefix, bias=flag(self.hf, "norm_bias"))

    def _layer_type(self, index: int) -> str:
        period = whole_number(self.hf, "global_attn_every_n_layers", 3)
        return layer_type(self.hf, index, SLIDING if index % period else FULL)

    def _rope(self, kind: str) -> RotaryEmbedding:
        """One for all layers of a type, because the table takes memory."""
        if kind not in self._ropes:
            usual = {"rope_theta": 160_000.0, "rope_local_base_freq": 10_000.0}
            config = rope_config({**usual, **self.hf}, layer_type=kind)
            self._ropes[kind] = RotaryEmbedding(self.ctx, config)
        return self._ropes[kind]


class ModernBertForSequenceClassification(ModernBertModel):
    unused: ClassVar[tuple[str, ...]] = ()

    def make_head(self) -> ClassificationHead:
        return self.classification_head(
            dense="head.dense",
            dense_bias=flag(self.hf, "classifier_bias"),
            activation_name=text(self.hf, "classifier_activation", "gelu"),
            norm=self.norm("head.norm"),
            out="classifier",
        )
