"""Decoders whose feed-forward blocks are mixtures of experts: Mixtral, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from inferplane.layers import Layer, ReplicatedLinear, Routing, SeparateExperts, SequentialBlock, SparseMoE
from inferplane.models.hf_fields import flag, whole_number
from inferplane.models.llama import MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM, qwen_window
from inferplane.models.shape import Shape, read_shape


class MixtralForCausalLM(MistralForCausalLM):
    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.self_attn", index),
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(f"{prefix}.block_sparse_moe", index),
        )

    def make_mlp(self, prefix: str, index: int) -> Layer:
        routing = Routing(
            num_experts=whole_number(self.hf, "num_local_experts", 8),
            top_k=whole_number(self.hf, "num_experts_per_tok", 2),
        )
        tensors = SeparateExperts(f"{prefix}.experts", gate="w1", up="w3", down="w2")
        return SparseMoE(
            self.router(f"{prefix}.gate", routing),
            self.experts(tensors, routing, self.shape.intermediate_size),
        )


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """With a shared expert behind a gate of its own."""

    expert_defaults: ClassVar[Mapping[str, Any]] = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }
    """What a missing key means."""

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=16)

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "qkv_bias", True)
        return self.self_attention(prefix, qkv_bias=bias, window=qwen_window(self.hf, index))

    def make_mlp(self, prefix: str, index: int) -> Layer:
        defaults = self.expert_defaults
        num_experts = num_experts_of(self.hf, defaults["num_experts"])
        if not has_experts(self.hf, index, num_experts):
            return self.gated_mlp(prefix)

        def number(key: str) -> int:
            return whole_number(self.hf, key, defaults[key])

        routing = Routing(
            num_experts=num_experts,
            top_k=number("num_experts_per_tok"),
            renormalize=flag(self.hf, "norm_topk_prob", defaults["norm_topk_prob"]),
        )
        inner = number("moe_intermediate_size")
        shared_inner = number("shared_expert_intermediate_size")
        return SparseMoE(
            self.router(f"{prefix}.gate", routing),
            self.experts(SeparateExperts(f"{prefix}.experts"), routing, inner),
            self.gated_mlp(f"{prefix}.shared_expert", shared_inner),
            ReplicatedLinear(
                replace(self.ctx, quantization=None),
                f"{prefix}.shared_expert_gate",
                self.shape.hidden_size,
                1,
            ),
        )


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=4)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        num_experts = num_experts_of(self.hf, 128)
        if not has_experts(self.hf, index, num_experts):
            return self.gated_mlp(prefix)
        routing = Routing(
            num_experts=num_experts,
            top_k=whole_number(self.hf, "num_experts_per_tok", 8),
            renormalize=flag(self.hf, "norm_topk_prob"),
        )
        inner = whole_number(self.hf, "moe_intermediate_size", 768)
        return SparseMoE(
            self.router(f"{prefix}.gate", routing),
            self.experts(SeparateExperts(f"{prefix}.experts"), routing, inner),
        )


def num_experts_of(hf: Mapping[str, Any], default: int) -> int:
    """Newer configurations write all names of this number as ``num_local_experts``."""
    key = "num_local_experts" if "num_local_experts" in hf else "num_experts"
    return whole_number(hf, key, default, least=0)


def has_experts(hf: Mapping[str, Any], index: int, num_experts: int) -> bool:
    """Qwen's rule: every ``decoder_sparse_step``-th layer but those that ``mlp_only_layers`` names."""
    step = whole_number(hf, "decoder_sparse_step", 1)
    is_dense = index in (hf.get("mlp_only_layers") or ())
    return num_experts > 0 and not is_dense and (index + 1) % step == 0
