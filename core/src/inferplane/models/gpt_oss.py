"""GPT-OSS: attention with learned sinks, a window in every other layer, experts with a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from inferplane.layers import Layer, Routing, SparseMoE, StackedExperts
from inferplane.models.decoder import Decoder
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import SLIDING, full_every, window_size


class GptOssForCausalLM(Decoder):
    rope_defaults: ClassVar = {"rope_theta": 150_000.0}

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=8, head_dim=64, eps=1e-5)

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias", True)
        return self.self_attention(
            prefix,
            qkv_bias=bias,
            output_bias=bias,
            window=window_size(self.hf, 128) if full_every(self.hf, index, 2) == SLIDING else None,
            has_sinks=True,
        )

    def make_mlp(self, prefix: str, index: int) -> Layer:
        routing = Routing(
            num_experts=whole_number(self.hf, "num_local_experts", 128),
            top_k=whole_number(self.hf, "num_experts_per_tok", 4),
        )
        tensors = StackedExperts(
            f"{prefix}.experts.gate_up_proj",
            f"{prefix}.experts.down_proj",
            is_transposed=True,
            is_interleaved=True,
        )
        experts = self.experts(
            tensors,
            routing,
            self.shape.intermediate_size,
            activation="clamped_swiglu",
            bias=True,
            swiglu_alpha=positive_number(self.hf, "swiglu_alpha", 1.702),
            swiglu_limit=positive_number(self.hf, "swiglu_limit", 7.0),
        )
        return SparseMoE(self.router(f"{prefix}.router", routing, bias=True), experts)
