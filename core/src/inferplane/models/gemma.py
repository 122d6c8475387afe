"""The Gemma family: scaled embeddings, norm weights around 0, and from Gemma 2 on windows and norms on both sides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers import Layer, Norm, RMSNorm, SequentialBlock
from inferplane.models.decoder import Decoder
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, optional_number, positive_number, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import SLIDING, full_every, window_size


class GemmaForCausalLM(Decoder):
    activation_key = "hidden_act"
    kv_heads = 16

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        if flag(self.hf, "use_bidirectional_attention"):
            raise ModelLoadError("use_bidirectional_attention is true; only causal attention is supported")
        # the factor is rounded as the embeddings are
        scale = torch.tensor(self.shape.hidden_size**0.5, dtype=ctx.dtype)
        self.embedding_scale = scale.item()
        self.logit_soft_cap = optional_number(self.hf, "final_logit_softcapping", self.default_logit_soft_cap)

    default_logit_soft_cap: float | None = None

    @classmethod
    def read_shape(cls, hf: Mapping[str, Any]) -> Shape:
        # old configurations write gelu and mean its tanh form
        activation = "gelu_pytorch_tanh" if hf.get(cls.activation_key) == "gelu" else None
        return read_shape(
            {**hf, cls.activation_key: activation} if activation else hf,
            kv_heads=cls.kv_heads,
            head_dim=256,
            activation_key=cls.activation_key,
            activation="gelu_pytorch_tanh",
            is_tied=True,
        )

    def make_norm(self, prefix: str, size: int | None = None) -> Norm:
        size = size or self.shape.hidden_size
        return RMSNorm(self.ctx, prefix, size, self.shape.norm_eps, weight_offset=1.0)

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super().embed(batch) * self.embedding_scale

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        cap = self.logit_soft_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)


class Gemma2ForCausalLM(GemmaForCausalLM):
    activation_key = "hidden_activation"
    kv_heads = 4
    default_logit_soft_cap: float | None = 30.0
    default_attention_soft_cap: float | None = 50.0

    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.self_attn", index),
            post_attention_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp_norm=self.make_norm(f"{prefix}.pre_feedforward_layernorm"),
            mlp=self.make_mlp(f"{prefix}.mlp", index),
            post_mlp_norm=self.make_norm(f"{prefix}.post_feedforward_layernorm"),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        return self.capped_attention(prefix, full_every(self.hf, index, 2))

    def capped_attention(self, prefix: str, layer_type: str, **options: Any) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(
            prefix,
            qkv_bias=bias,
            output_bias=bias,
            scale=positive_number(self.hf, "query_pre_attn_scalar", 256.0) ** -0.5,
            soft_cap=optional_number(self.hf, "attn_logit_softcapping", self.default_attention_soft_cap),
            window=window_size(self.hf) if layer_type == SLIDING else None,
            **options,
        )


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Five layers with a window, then one without, which have rotary embeddings of their own; norms on q and k."""

    default_logit_soft_cap = None
    default_attention_soft_cap = None
    rope_defaults: ClassVar = {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}

    def make_attention(self, prefix: str, index: int) -> Layer:
        kind = full_every(self.hf, index, whole_number(self.hf, "sliding_window_pattern", 6))
        return self.capped_attention(prefix, kind, rope=self.rope(kind), **self.head_norms(prefix))
