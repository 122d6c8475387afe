"""The Llama family: Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.layers import Layer
from inferplane.models.decoder import Decoder
from inferplane.models.hf_fields import flag
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import qwen_window, refuse_longer, window_size


class LlamaForCausalLM(Decoder):
    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.gated_mlp(prefix, bias=flag(self.hf, "mlp_bias"))


class MistralForCausalLM(Decoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=8)

    def make_attention(self, prefix: str, index: int) -> Layer:
        refuse_longer(window_size(self.hf), self.ctx)
        return self.self_attention(prefix)


class Qwen2ForCausalLM(Decoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=32)

    def make_attention(self, prefix: str, index: int) -> Layer:
        refuse_longer(qwen_window(self.hf), self.ctx)
        return self.self_attention(prefix, qkv_bias=True)


class Qwen3ForCausalLM(Decoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=32, head_dim=128)

    def make_attention(self, prefix: str, index: int) -> Layer:
        refuse_longer(qwen_window(self.hf), self.ctx)
        bias, head_dim = flag(self.hf, "attention_bias"), self.shape.heads.head_dim
        return self.self_attention(
            prefix,
            qkv_bias=bias,
            output_bias=bias,
            q_norm=self.make_norm(f"{prefix}.q_norm", head_dim),
            k_norm=self.make_norm(f"{prefix}.k_norm", head_dim),
        )
