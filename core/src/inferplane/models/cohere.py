"""The Command family: attention and feed-forward side by side behind one norm that has a mean and no bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from inferplane.api.model import BuildContext
from inferplane.layers import Layer, LayerNorm, Norm, ParallelBlock
from inferplane.models.decoder import Decoder
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import SLIDING, full_every, window_size


class CohereForCausalLM(Decoder):
    has_interleaved_rope = True

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        self.logit_scale = positive_number(self.hf, "logit_scale", 0.0625)

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        if flag(hf, "use_qk_norm"):
            raise ModelLoadError("use_qk_norm is true, which is not supported by this family")
        return read_shape(hf, eps_key="layer_norm_eps", eps=1e-5, is_tied=True)

    def make_norm(self, prefix: str, size: int | None = None) -> Norm:
        return LayerNorm(self.ctx, prefix, size or self.shape.hidden_size, self.shape.norm_eps, bias=False)

    def make_block(self, prefix: str, index: int) -> Layer:
        return ParallelBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.self_attn", index),
            mlp=self.make_mlp(f"{prefix}.mlp", index),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) * self.logit_scale


class Cohere2ForCausalLM(CohereForCausalLM):
    """Three layers with a window and rotary embedding, then one that sees all tokens and no positions."""

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        kind = full_every(self.hf, index, whole_number(self.hf, "sliding_window_pattern", 4))
        window = window_size(self.hf) if kind == SLIDING else None
        rope = None if window is None else self.rope()
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias, window=window, rope=rope)
