"""What all decoders have in common. A family's class says what it does differently, and nothing else.

As it stands here a block is: norm, attention, norm, gated feed-forward, with the tensor names that most checkpoints
have. `llama.py` is the shortest example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.model import BuildContext, ForwardBatch, Model
from inferplane.api.state import StateLayer
from inferplane.layers import (
    MLP,
    AllHeadsRMSNorm,
    Attention,
    Experts,
    GatedMLP,
    Layer,
    Norm,
    ParallelLMHead,
    RMSNorm,
    RotaryEmbedding,
    Router,
    Routing,
    SelfAttention,
    SeparateExperts,
    SequentialBlock,
    StackedExperts,
    StateMixer,
    VocabParallelEmbedding,
    walk_layers,
)
from inferplane.layers.parallel import even_share, kv_head_share
from inferplane.models.rope_config import rope_config
from inferplane.models.shape import Shape, read_shape
from inferplane.models.weights import load_weights


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls the parts of a decoder."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    head: str = "lm_head"


class Decoder(Model):
    """Token embedding, blocks, a last norm and the output head."""

    names: ClassVar[Names] = Names()
    rope_defaults: ClassVar[Mapping[str, Any]] = {}
    """Rope settings of the family where a configuration leaves them out."""
    has_interleaved_rope: ClassVar[bool] = False
    """Whether neighbouring dimensions turn as a pair."""

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        self.ctx = ctx
        self.hf = ctx.hf_config
        self.shape = self.read_shape(self.hf)
        self._ropes: dict[str | None, RotaryEmbedding] = {}
        shape, names = self.shape, self.names
        root = f"{prefix}." if prefix else ""
        self.embedding = VocabParallelEmbedding(
            ctx, root + names.embedding, shape.vocab_size, shape.hidden_size
        )
        self.layers = [
            self.make_block(f"{root}{names.layers}.{index}", index) for index in range(shape.num_layers)
        ]
        self.norm = self.make_norm(root + names.norm)
        self.head = self.make_head(root + names.head)

    # what families override

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf)

    def make_block(self, prefix: str, index: int) -> Layer:
        """Block number ``index``, called as a `SequentialBlock` is."""
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.self_attn", index),
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(f"{prefix}.mlp", index),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        return self.self_attention(prefix)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.gated_mlp(prefix)

    def make_norm(self, prefix: str, size: int | None = None) -> Norm:
        """A norm over ``size`` dimensions, or over the hidden size."""
        return RMSNorm(self.ctx, prefix, size or self.shape.hidden_size, self.shape.norm_eps)

    def make_head(self, prefix: str) -> ParallelLMHead | None:
        """None where no tokens are chosen; then `compute_logits` is the family's own."""
        shape = self.shape
        tied_to = self.embedding if shape.has_tied_embeddings else None
        return ParallelLMHead(self.ctx, prefix, shape.vocab_size, shape.hidden_size, tied_to)

    # what they build with

    def self_attention(self, prefix: str, **options: Any) -> SelfAttention:
        """With the model's sizes and, unless ``rope`` is given, its only rotary embedding."""
        if "rope" not in options:
            options["rope"] = self.rope()
        return SelfAttention(self.ctx, prefix, self.shape.hidden_size, self.shape.heads, **options)

    def gated_mlp(self, prefix: str, intermediate_size: int | None = None, **options: Any) -> GatedMLP:
        shape = self.shape
        size = intermediate_size or shape.intermediate_size
        return GatedMLP(self.ctx, prefix, shape.hidden_size, size, activation=shape.activation, **options)

    def router(self, prefix: str, routing: Routing, **options: Any) -> Router:
        return Router(self.ctx, prefix, self.shape.hidden_size, routing, **options)

    def experts(
        self,
        tensors: SeparateExperts | StackedExperts,
        routing: Routing,
        intermediate_size: int,
        **options: Any,
    ) -> Experts:
        options.setdefault("activation", self.shape.activation)
        return Experts(
            self.ctx, tensors, routing.num_experts, self.shape.hidden_size, intermediate_size, **options
        )

    def mlp(self, prefix: str, up: str, down: str, **options: Any) -> MLP:
        shape = self.shape
        return MLP(
            self.ctx,
            prefix,
            shape.hidden_size,
            shape.intermediate_size,
            up=up,
            down=down,
            activation_name=shape.activation,
            **options,
        )

    def head_norms(self, prefix: str) -> dict[str, Norm]:
        """Norms on each head of q and k, as options of `self_attention`."""
        head_dim = self.shape.heads.head_dim
        return {name: self.make_norm(f"{prefix}.{name}", head_dim) for name in ("q_norm", "k_norm")}

    def all_heads_norms(self, prefix: str) -> dict[str, AllHeadsRMSNorm]:
        """Norms on all heads of q and k together, as options of `self_attention`."""
        ctx, heads, eps = self.ctx, self.shape.heads, self.shape.norm_eps
        q_heads = even_share(heads.num_heads, ctx.comm, f"{prefix}: number of attention heads")
        kv_heads = kv_head_share(heads.num_kv_heads, ctx.comm, f"{prefix}: number of KV heads")
        return {
            "q_norm": AllHeadsRMSNorm(ctx, f"{prefix}.q_norm", q_heads, heads.head_dim, eps),
            "k_norm": AllHeadsRMSNorm(ctx, f"{prefix}.k_norm", kv_heads, heads.head_dim, eps),
        }

    def rope(self, layer_type: str | None = None) -> RotaryEmbedding:
        """One for all layers of a type, because the table takes memory."""
        if layer_type not in self._ropes:
            settings = {**self.rope_defaults, **self.hf}
            config = rope_config(settings, layer_type=layer_type, head_dim=self.shape.heads.head_dim)
            self._ropes[layer_type] = RotaryEmbedding(
                self.ctx, config, is_interleaved=self.has_interleaved_rope
            )
        return self._ropes[layer_type]

    # running

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden, residual = self.embed(batch), None
        *layers, last = self.layers
        for layer in layers:
            hidden, residual = layer(hidden, residual, batch)
        rows = None if self.ctx.config.count_expert_tokens else batch.output_rows  # routers count all tokens
        if rows is not None and isinstance(last, SequentialBlock):
            hidden, residual = last(hidden, residual, batch, rows)
        else:
            hidden, residual = last(hidden, residual, batch)
        return self.norm.add(hidden, residual)[0]

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return self.embedding(batch.token_ids)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self.head is not None, "a decoder without a head says what its logits are"
        return self.head(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        named = ((self.own_name(name), tensor) for name, tensor in tensors)
        load_weights(self, ((name, tensor) for name, tensor in named if name is not None))

    def is_extra_layer(self, name: str) -> bool:
        """Whether a tensor is of a layer behind the last, as those for multi-token prediction are."""
        rest = name.removeprefix(f"{self.names.layers}.")
        number = rest.partition(".")[0]
        return rest != name and number.isdecimal() and int(number) >= self.shape.num_layers

    def own_name(self, name: str) -> str | None:
        """A checkpoint's name of a tensor as the layers here have it; None for one that no model needs."""
        return name

    def attention_layers(self) -> list[AttentionLayer]:
        layers = [layer for layer in walk_layers(self) if isinstance(layer, Attention)]
        return [layer.description for layer in layers if layer.kv_of is None]

    def state_layers(self) -> list[StateLayer]:
        return [layer.description for layer in walk_layers(self) if isinstance(layer, StateMixer)]
