"""The GLM family: half of each head turned, neighbouring dimensions as a pair up to GLM-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from inferplane.layers import Layer, Routing, SeparateExperts, SequentialBlock, SparseMoE
from inferplane.models.decoder import Decoder
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.shape import Shape, read_shape


class GlmForCausalLM(Decoder):
    has_interleaved_rope = True
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=2, head_dim=128, eps=1.5625e-07)

    def make_attention(self, prefix: str, index: int) -> Layer:
        return self.self_attention(prefix, qkv_bias=flag(self.hf, "attention_bias", True))

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.gated_mlp(prefix, fused_name="gate_up_proj")


class Glm4ForCausalLM(GlmForCausalLM):
    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.self_attn", index),
            post_attention_norm=self.make_norm(f"{prefix}.post_self_attn_layernorm"),
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(f"{prefix}.mlp", index),
            post_mlp_norm=self.make_norm(f"{prefix}.post_mlp_layernorm"),
        )


class Glm4MoeForCausalLM(Decoder):
    """GLM-4.5 and later: experts with a shared one, chosen by sigmoid scores with a bias, after some dense layers."""

    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=8, eps=1e-5)

    def make_attention(self, prefix: str, index: int) -> Layer:
        norms = self.head_norms(prefix) if flag(self.hf, "use_qk_norm") else {}
        return self.self_attention(prefix, qkv_bias=flag(self.hf, "attention_bias"), **norms)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        if index < whole_number(self.hf, "first_k_dense_replace", 1, least=0):
            return self.gated_mlp(prefix)
        routing = Routing(
            num_experts=whole_number(self.hf, "n_routed_experts", 128),
            top_k=whole_number(self.hf, "num_experts_per_tok", 8),
            score="sigmoid",
            renormalize=flag(self.hf, "norm_topk_prob", True),
            scale=positive_number(self.hf, "routed_scaling_factor", 1.0),
            num_groups=whole_number(self.hf, "n_group", 1),
            top_groups=whole_number(self.hf, "topk_group", 1),
            best_of_group=2,
            has_selection_bias=True,
        )
        inner = whole_number(self.hf, "moe_intermediate_size", 1408)
        num_shared = whole_number(self.hf, "n_shared_experts", 1)
        return SparseMoE(
            self.router(f"{prefix}.gate", routing, dtype="float32"),
            self.experts(SeparateExperts(f"{prefix}.experts"), routing, inner),
            self.gated_mlp(f"{prefix}.shared_experts", num_shared * inner),
        )

    def own_name(self, name: str) -> str | None:
        """Layers behind the last are for multi-token prediction, which no answer needs."""
        return None if self.is_extra_layer(name) else name
