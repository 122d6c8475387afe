"""The OLMo family: norms behind attention and feed-forward, and on all heads of q and k together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from inferplane.layers import Layer, RotaryEmbedding, Routing, SeparateExperts, SequentialBlock, SparseMoE
from inferplane.models.decoder import Decoder
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, whole_number
from inferplane.models.rope_config import rope_config
from inferplane.models.shape import Shape, read_shape
from inferplane.models.sparse import num_experts_of
from inferplane.models.windows import SLIDING, full_every, window_size


class Olmo2ForCausalLM(Decoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, eps=1e-5)

    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention=self.make_attention(f"{prefix}.self_attn", index),
            post_attention_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(f"{prefix}.mlp", index),
            post_mlp_norm=self.make_norm(f"{prefix}.post_feedforward_layernorm"),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        return self.attention_with_norms(prefix)

    def attention_with_norms(self, prefix: str, **options: Any) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(
            prefix, qkv_bias=bias, output_bias=bias, **self.all_heads_norms(prefix), **options
        )


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """Three layers with a window, then one without; only that one's positions are stretched."""

    rope_defaults: ClassVar = {"rope_theta": 500000.0}

    def make_attention(self, prefix: str, index: int) -> Layer:
        kind = full_every(self.hf, index, 4)
        window = window_size(self.hf) if kind == SLIDING else None
        return self.attention_with_norms(prefix, rope=self.rope(kind), window=window)

    def rope(self, layer_type: str | None = None) -> RotaryEmbedding:
        if layer_type == SLIDING and "rope_parameters" not in self.hf and layer_type not in self._ropes:
            unstretched = {**self.rope_defaults, **self.hf, "rope_scaling": None}
            config = rope_config(unstretched, head_dim=self.shape.heads.head_dim)
            self._ropes[layer_type] = RotaryEmbedding(self.ctx, config)
        return super().rope(layer_type)


class OlmoeForCausalLM(Decoder):
    """Norms before, as usual; experts in every layer."""

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        if hf.get("clip_qkv") is not None:
            raise ModelLoadError(f"clip_qkv is {hf['clip_qkv']!r}; only null is supported")
        return read_shape(hf, eps=1e-5)

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias, **self.all_heads_norms(prefix))

    def make_mlp(self, prefix: str, index: int) -> Layer:
        routing = Routing(
            num_experts=num_experts_of(self.hf, 64),
            top_k=whole_number(self.hf, "num_experts_per_tok", 8),
            renormalize=flag(self.hf, "norm_topk_prob"),
        )
        tensors = SeparateExperts(f"{prefix}.experts")
        return SparseMoE(
            self.router(f"{prefix}.gate", routing),
            self.experts(tensors, routing, self.shape.intermediate_size),
        )
