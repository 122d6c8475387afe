"""Decoders with LayerNorm and a feed-forward block without gate: GPT-2, GPT-NeoX, Falcon and StarCoder2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers import (
    FusedQKV,
    Layer,
    LayerNorm,
    Norm,
    ParallelBlock,
    PositionEmbedding,
    SequentialBlock,
)
from inferplane.models.decoder import Decoder, Names
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import window_size


class _LayerNormDecoder(Decoder):
    def make_norm(self, prefix: str, size: int | None = None) -> Norm:
        return LayerNorm(self.ctx, prefix, size or self.shape.hidden_size, self.shape.norm_eps)


class Starcoder2ForCausalLM(_LayerNormDecoder):
    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(
            hf, kv_heads=2, eps_key="norm_epsilon", eps=1e-5, activation="gelu_pytorch_tanh", is_tied=True
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "use_bias", True)
        window = window_size(self.hf, default=None)
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias, window=window)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.mlp(prefix, "c_fc", "c_proj", bias=flag(self.hf, "use_bias", True))


class GPT2LMHeadModel(_LayerNormDecoder):
    """Learned positions, and matrices stored as ``[in, out]``."""

    names = Names("transformer.wte", "transformer.h", "transformer.ln_f")

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        num_positions = whole_number(self.hf, "max_position_embeddings", 1024)
        self.positions = PositionEmbedding(ctx, "transformer.wpe", num_positions, self.shape.hidden_size)

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        for key, usual in (("scale_attn_weights", True), ("scale_attn_by_inverse_layer_idx", False)):
            if flag(hf, key, usual) != usual:
                raise ModelLoadError(f"{key} is {hf[key]!r}; only {usual} is supported")
        inner = whole_number(hf, "n_inner", 4 * whole_number(hf, "hidden_size"))
        return read_shape(
            {**hf, "intermediate_size": inner, "num_key_value_heads": None},
            eps_key="layer_norm_epsilon",
            eps=1e-5,
            activation_key="activation_function",
            activation="gelu_new",
            is_tied=True,
        )

    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.ln_1"),
            attention=self.make_attention(f"{prefix}.attn", index),
            mlp_norm=self.make_norm(f"{prefix}.ln_2"),
            mlp=self.mlp(f"{prefix}.mlp", "c_fc", "c_proj", is_transposed=True),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        return self.self_attention(
            prefix,
            tensors=FusedQKV("c_attn"),
            output="c_proj",
            qkv_bias=True,
            output_bias=True,
            is_transposed=True,
            rope=None,
        )

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super().embed(batch) + self.positions(batch.positions)

    def own_name(self, name: str) -> str | None:
        """The published checkpoint has no prefix, and masks among its tensors."""
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return None
        return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


class GPTNeoXForCausalLM(_LayerNormDecoder):
    names = Names("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out")
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.25}

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        hf = {**hf, "num_key_value_heads": None}
        return read_shape(hf, eps_key="layer_norm_eps", eps=1e-5, activation="gelu")

    def make_block(self, prefix: str, index: int) -> Layer:
        make = ParallelBlock if flag(self.hf, "use_parallel_residual", True) else SequentialBlock
        return make(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.attention", index),
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.mlp(f"{prefix}.mlp", "dense_h_to_4h", "dense_4h_to_h"),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias", True)
        return self.self_attention(
            prefix,
            tensors=FusedQKV("query_key_value", is_grouped=True),
            output="dense",
            qkv_bias=bias,
            output_bias=bias,
        )

    def own_name(self, name: str) -> str | None:
        """Old checkpoints have masks among their tensors."""
        return None if name.endswith((".attention.bias", ".attention.masked_bias")) else name


class FalconForCausalLM(_LayerNormDecoder):
    """Falcon 7B and 40B: attention and feed-forward side by side, behind one norm or one each."""

    names = Names("transformer.word_embeddings", "transformer.h", "transformer.ln_f")

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        if flag(hf, "alibi"):
            raise ModelLoadError("alibi is true; only rotary position embeddings are supported")
        num_heads = whole_number(hf, "num_attention_heads")
        has_one_kv_head = flag(hf, "multi_query", True) and not flag(hf, "new_decoder_architecture")
        return read_shape(
            {
                **hf,
                "num_key_value_heads": 1 if has_one_kv_head else whole_number(hf, "num_kv_heads", num_heads),
                "intermediate_size": whole_number(hf, "ffn_hidden_size", 4 * whole_number(hf, "hidden_size")),
            },
            eps_key="layer_norm_epsilon",
            eps=1e-5,
            activation_key="activation",
            activation="gelu",
            is_tied=True,
        )

    def make_block(self, prefix: str, index: int) -> Layer:
        attention = self.make_attention(f"{prefix}.self_attention", index)
        bias = flag(self.hf, "bias")
        mlp = self.mlp(f"{prefix}.mlp", "dense_h_to_4h", "dense_4h_to_h", bias=bias)
        is_new = flag(self.hf, "new_decoder_architecture")
        if not flag(self.hf, "parallel_attn", True):
            return SequentialBlock(
                attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
                attention=attention,
                mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
                mlp=mlp,
            )
        if whole_number(self.hf, "num_ln_in_parallel_attn", 2 if is_new else 1) == 2:
            return ParallelBlock(
                attention_norm=self.make_norm(f"{prefix}.ln_attn"),
                attention=attention,
                mlp_norm=self.make_norm(f"{prefix}.ln_mlp"),
                mlp=mlp,
            )
        norm = self.make_norm(f"{prefix}.input_layernorm")
        return ParallelBlock(attention_norm=norm, attention=attention, mlp=mlp)

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "bias")
        tensors = FusedQKV("query_key_value", is_grouped=True)
        return self.self_attention(prefix, tensors=tensors, output="dense", qkv_bias=bias, output_bias=bias)
