"""What all encoders have in common: embeddings, blocks that see whole sequences, and perhaps a head over classes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.model import BuildContext, EncoderLayer, ForwardBatch, Model
from inferplane.layers import (
    ClassificationHead,
    EncoderAttention,
    Layer,
    LayerNorm,
    SelfAttention,
    walk_layers,
)
from inferplane.models.shape import Shape
from inferplane.models.weights import load_weights


class Encoder(Model):
    """Without a head it embeds: what is pooled is the last hidden state.

    Tensors are named as in a checkpoint without a head; one that has a head puts ``root`` before them.
    """

    root: ClassVar[str] = ""
    unused: ClassVar[tuple[str, ...]] = ()
    """Beginnings of the names of tensors that pooling has no use for."""

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        self.ctx = ctx
        self.hf = ctx.hf_config
        self.shape = self.read_shape(self.hf)
        self.make_embeddings()
        self.layers = [self.make_block(index) for index in range(self.shape.num_layers)]
        self.last_norm = self.make_last_norm()
        self.head = self.make_head()

    # what families override

    @staticmethod
    @abstractmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape: ...

    @abstractmethod
    def make_embeddings(self) -> None:
        """Sets the layers that `embed` uses."""

    @abstractmethod
    def embed(self, batch: ForwardBatch) -> torch.Tensor: ...

    @abstractmethod
    def make_block(self, index: int) -> Layer:
        """Block number ``index``, called as a `SequentialBlock` is."""

    def make_last_norm(self) -> LayerNorm | None:
        return None

    def make_head(self) -> ClassificationHead | None:
        """None for embeddings."""
        return None

    # what they build with

    def layer_norm(self, prefix: str, *, bias: bool = True) -> LayerNorm:
        return LayerNorm(self.ctx, prefix, self.shape.hidden_size, self.shape.norm_eps, bias=bias)

    def self_attention(self, prefix: str, **options: Any) -> SelfAttention:
        shape = self.shape
        return SelfAttention(self.ctx, prefix, shape.hidden_size, shape.heads, is_encoder=True, **options)

    def classification_head(self, **options: Any) -> ClassificationHead:
        """With as many classes as the configuration names."""
        pooler = self.ctx.config.model.pooler
        assert pooler is not None, "a model for classification has a pooler, which names the classes"
        return ClassificationHead(self.ctx, self.shape.hidden_size, len(pooler.labels), **options)

    # running

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden, residual = self.embed(batch), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        if self.last_norm is not None:
            return self.last_norm.add(hidden, residual)[0]
        return hidden if residual is None else hidden + residual

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.head is None else self.head(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = ((self.own_name(name), tensor) for name, tensor in tensors)
        load_weights(self, ((name, tensor) for name, tensor in named if name is not None))

    def own_name(self, name: str) -> str | None:
        """A checkpoint's name of a tensor as the layers here have it; None for one that pooling has no use for."""
        name = name.removeprefix(self.root)
        return None if name.startswith(self.unused) else name

    def attention_layers(self) -> list[AttentionLayer]:
        return []

    def encoder_layers(self) -> list[EncoderLayer]:
        return [layer.description for layer in walk_layers(self) if isinstance(layer, EncoderAttention)]
