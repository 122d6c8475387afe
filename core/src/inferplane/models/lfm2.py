"""LFM2: gated short convolutions in most layers, attention with norms on q and k in some."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from inferplane.layers import Layer, SequentialBlock, ShortConvolution
from inferplane.models.decoder import Decoder, Names
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import FULL, LINEAR, mixer_type

_MLP_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Lfm2ForCausalLM(Decoder):
    names = Names(norm="model.embedding_norm")
    rope_defaults: ClassVar = {"rope_theta": 1000000.0}

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        size = whole_number(hf, "block_ff_dim", whole_number(hf, "intermediate_size", 12288))
        if flag(hf, "block_auto_adjust_ff_dim", True):
            multiple = whole_number(hf, "block_multiple_of", 256)
            size = int(positive_number(hf, "block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
            size = -(-size // multiple) * multiple
        is_tied = flag(hf, "tie_embedding", flag(hf, "tie_word_embeddings", True))
        settings = {**hf, "intermediate_size": size, "tie_word_embeddings": is_tied}
        return read_shape(settings, kv_heads=8, eps_key="norm_eps", eps=1e-5)

    def make_block(self, prefix: str, index: int) -> Layer:
        with_attention = self.hf.get("full_attn_idxs")
        if with_attention is not None and not isinstance(with_attention, list):
            raise ModelLoadError(f"full_attn_idxs should be a list of layers, but is {with_attention!r}")
        usual = FULL if with_attention is None or index in with_attention else LINEAR
        is_full = mixer_type(self.hf, index, usual) == FULL
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.operator_norm"),
            attention=self.make_attention(f"{prefix}.self_attn", index)
            if is_full
            else self.make_convolution(f"{prefix}.conv"),
            mlp_norm=self.make_norm(f"{prefix}.ffn_norm"),
            mlp=self.make_mlp(f"{prefix}.feed_forward", index),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        head_dim = self.shape.heads.head_dim
        return self.self_attention(
            prefix,
            output="out_proj",
            q_norm=self.make_norm(f"{prefix}.q_layernorm", head_dim),
            k_norm=self.make_norm(f"{prefix}.k_layernorm", head_dim),
        )

    def make_convolution(self, prefix: str) -> Layer:
        width = whole_number(self.hf, "conv_L_cache", 3)
        bias = flag(self.hf, "conv_bias")
        return ShortConvolution(self.ctx, prefix, self.shape.hidden_size, conv_width=width, bias=bias)

    def own_name(self, name: str) -> str | None:
        before, found, after = name.partition(".feed_forward.")
        part, dot, rest = after.partition(".")
        return f"{before}{found}{_MLP_NAMES.get(part, part)}{dot}{rest}"
