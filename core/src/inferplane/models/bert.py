"""BERT, RoBERTa and XLM-RoBERTa: learned positions, and a norm behind every sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from inferplane.api.model import ForwardBatch
from inferplane.layers import (
    MLP,
    ClassificationHead,
    Layer,
    PositionEmbedding,
    PostNormBlock,
    SeparateQKV,
    VocabParallelEmbedding,
)
from inferplane.models.encoder import Encoder
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, text, whole_number
from inferplane.models.shape import Shape, read_shape


class BertModel(Encoder):
    root = "bert."
    unused: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "pooler.", "cls.")

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        if (kind := text(hf, "position_embedding_type", "absolute")) != "absolute":
            raise ModelLoadError(f"position_embedding_type is {kind!r}; only absolute is supported")
        for key in ("is_decoder", "add_cross_attention"):
            if flag(hf, key):
                raise ModelLoadError(f"{key} is true; only encoders are supported")
        return read_shape(hf, eps_key="layer_norm_eps", eps=1e-12, activation="gelu")

    def make_embeddings(self) -> None:
        ctx, size = self.ctx, self.shape.hidden_size
        self._offset = whole_number(self.hf, "position_offset", 0, least=0)
        num_positions = whole_number(self.hf, "max_position_embeddings", 512) + self._offset
        num_types = whole_number(self.hf, "type_vocab_size", 2)
        self.words = VocabParallelEmbedding(ctx, "embeddings.word_embeddings", self.shape.vocab_size, size)
        self.positions = PositionEmbedding(ctx, "embeddings.position_embeddings", num_positions, size)
        self.types = PositionEmbedding(ctx, "embeddings.token_type_embeddings", num_types, size)
        self.embedding_norm = self.layer_norm("embeddings.LayerNorm")
        self._has_types = num_types > 1

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        types = batch.token_types if self._has_types else None
        if types is None:
            types = torch.zeros_like(batch.token_ids)
        words = self.words(batch.token_ids) + self.types(types)
        return self.embedding_norm(words + self.positions(batch.positions + self._offset))

    def make_block(self, index: int) -> Layer:
        prefix, shape = f"encoder.layer.{index}", self.shape
        return PostNormBlock(
            attention=self.self_attention(
                f"{prefix}.attention",
                tensors=SeparateQKV("self.query", "self.key", "self.value"),
                output="output.dense",
                qkv_bias=True,
                output_bias=True,
                rope=None,
            ),
            attention_norm=self.layer_norm(f"{prefix}.attention.output.LayerNorm"),
            mlp=MLP(
                self.ctx,
                prefix,
                shape.hidden_size,
                shape.intermediate_size,
                up="intermediate.dense",
                down="output.dense",
                activation_name=shape.activation,
            ),
            mlp_norm=self.layer_norm(f"{prefix}.output.LayerNorm"),
        )

    def own_name(self, name: str) -> str | None:
        """The oldest checkpoints call a norm's weight and bias by the letters of the paper."""
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        return super().own_name(name)


class BertForSequenceClassification(BertModel):
    unused: ClassVar[tuple[str, ...]] = ("embeddings.position_ids",)

    def make_head(self) -> ClassificationHead:
        return self.classification_head(dense="pooler.dense", out="classifier")


class XLMRobertaModel(BertModel):
    root = "roberta."
    unused: ClassVar[tuple[str, ...]] = ("embeddings.position_ids", "pooler.", "lm_head.")


class XLMRobertaForSequenceClassification(XLMRobertaModel):
    def make_head(self) -> ClassificationHead:
        return self.classification_head(dense="classifier.dense", out="classifier.out_proj")
