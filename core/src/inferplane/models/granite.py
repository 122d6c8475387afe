"""The Granite family, which scales embeddings, attention, what a block adds, and logits."""

from __future__ import annotations

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers import Layer, Routing, SequentialBlock, SparseMoE, StackedExperts
from inferplane.models.decoder import Decoder
from inferplane.models.hf_fields import flag, positive_number, whole_number


class GraniteForCausalLM(Decoder):
    feed_forward = "mlp"

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        self.embedding_multiplier = positive_number(self.hf, "embedding_multiplier", 1.0)
        self.logits_scaling = positive_number(self.hf, "logits_scaling", 1.0)

    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.self_attn", index),
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(f"{prefix}.{self.feed_forward}", index),
            residual_scale=positive_number(self.hf, "residual_multiplier", 1.0),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        scale = positive_number(self.hf, "attention_multiplier", 1.0)
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias, scale=scale)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.gated_mlp(prefix, bias=flag(self.hf, "mlp_bias"))

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super().embed(batch) * self.embedding_multiplier

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) / self.logits_scaling


class GraniteMoeForCausalLM(GraniteForCausalLM):
    feed_forward = "block_sparse_moe"

    def make_mlp(self, prefix: str, index: int) -> Layer:
        routing = Routing(
            num_experts=whole_number(self.hf, "num_local_experts", 8),
            top_k=whole_number(self.hf, "num_experts_per_tok", 2),
        )
        tensors = StackedExperts(f"{prefix}.input_linear.weight", f"{prefix}.output_linear.weight")
        return SparseMoE(
            self.router(f"{prefix}.router.layer", routing),
            self.experts(tensors, routing, self.shape.intermediate_size),
        )
