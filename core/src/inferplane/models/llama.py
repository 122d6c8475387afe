"""The Llama family: Llama, Mistral, Qwen2 and Qwen3, and with fused projections Phi-3 and Phi-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.layers import FusedQKV, Layer
from inferplane.models.decoder import Decoder
from inferplane.models.hf_fields import flag, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import FULL, SLIDING, layer_type, window_size


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
        return self.self_attention(prefix, window=window_size(self.hf))


class Qwen2ForCausalLM(Decoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=32)

    def make_attention(self, prefix: str, index: int) -> Layer:
        return self.self_attention(prefix, qkv_bias=True, window=qwen_window(self.hf, index))


class Qwen3ForCausalLM(Decoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=32, head_dim=128)

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(
            prefix,
            qkv_bias=bias,
            output_bias=bias,
            window=qwen_window(self.hf, index),
            **self.head_norms(prefix),
        )


class Phi3ForCausalLM(Decoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, eps=1e-5)

    def make_attention(self, prefix: str, index: int) -> Layer:
        window = window_size(self.hf, default=None)
        return self.self_attention(prefix, tensors=FusedQKV("qkv_proj"), window=window)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.gated_mlp(prefix, fused_name="gate_up_proj")


def qwen_window(hf: Mapping[str, Any], index: int) -> int | None:
    """Windows are off unless asked for, and then only in the layers from ``max_window_layers`` on."""
    if not flag(hf, "use_sliding_window"):
        return None
    num_full = whole_number(hf, "max_window_layers", 28, least=0)
    kind = layer_type(hf, index, FULL if index < num_full else SLIDING)
    return window_size(hf) if kind == SLIDING else None
