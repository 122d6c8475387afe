"""The Granite family, which scales embeddings, attention, what a block adds, and logits."""

from __future__ import annotations

from typing import Any

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers import Layer, Routing, SequentialBlock, SparseMoE, StackedExperts
from inferplane.models.decoder import Decoder
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.state_space import state_space_mixer
from inferplane.models.windows import FULL, LINEAR, mixer_type


class GraniteForCausalLM(Decoder):
    feed_forward = "mlp"

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        self.embedding_multiplier = positive_number(self.hf, "embedding_multiplier", 1.0)
        self.logits_scaling = positive_number(self.hf, "logits_scaling", 1.0)

    def make_block(self, prefix: str, index: int) -> Layer:
        attention = self.make_attention(f"{prefix}.self_attn", index)
        return self.block(prefix, attention, self.make_mlp(f"{prefix}.{self.feed_forward}", index))

    def block(self, prefix: str, attention: Layer, mlp: Layer) -> SequentialBlock:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=attention,
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=mlp,
            residual_scale=positive_number(self.hf, "residual_multiplier", 1.0),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        scale = positive_number(self.hf, "attention_multiplier", 1.0)
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias, scale=scale, **self.positions())

    def positions(self) -> dict[str, Any]:
        """Options of `self_attention`."""
        return {}

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.gated_mlp(prefix, bias=flag(self.hf, "mlp_bias"))

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super().embed(batch) * self.embedding_multiplier

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) / self.logits_scaling


class GraniteMoeForCausalLM(GraniteForCausalLM):
    feed_forward = "block_sparse_moe"

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.mixture(prefix)

    def mixture(self, prefix: str, shared: Layer | None = None) -> SparseMoE:
        routing = Routing(
            num_experts=whole_number(self.hf, "num_local_experts", 8),
            top_k=whole_number(self.hf, "num_experts_per_tok", 2),
        )
        tensors = StackedExperts(f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight")
        return SparseMoE(
            self.router(f"{prefix}.router.layer", routing),
            self.experts(tensors, routing, self.shape.intermediate_size),
            shared,
        )


class GraniteMoeHybridForCausalLM(GraniteMoeForCausalLM):
    """State-space mixers in most layers, and an expert that every token goes through besides its own."""

    def make_block(self, prefix: str, index: int) -> Layer:
        shared = self.gated_mlp(
            f"{prefix}.shared_mlp",
            whole_number(self.hf, "shared_intermediate_size", 1024),
            fused_name="input_linear",
            down_name="output_linear",
        )
        has_experts = whole_number(self.hf, "num_local_experts", 8, least=0) > 0
        mlp = self.mixture(f"{prefix}.block_sparse_moe", shared) if has_experts else shared
        if mixer_type(self.hf, index, LINEAR) == FULL:
            return self.block(prefix, self.make_attention(f"{prefix}.self_attn", index), mlp)
        size, eps = self.shape.hidden_size, self.shape.norm_eps
        return self.block(prefix, state_space_mixer(self.ctx, f"{prefix}.mamba", size, eps), mlp)

    def positions(self) -> dict[str, Any]:
        kind = self.hf.get("position_embedding_type")
        if kind not in (None, "nope", "rope"):
            raise ModelLoadError(f"position_embedding_type is {kind!r}; known: rope, nope and null")
        return {} if kind == "rope" else {"rope": None}
