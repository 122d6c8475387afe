"""The text part of Llama 4: chunks of attention, every fourth layer without positions, one expert for each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from inferplane.layers import Layer, Routing, SelfAttention, SequentialBlock, SparseMoE, StackedExperts
from inferplane.models.decoder import Decoder
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.windows import CHUNKED, FULL, layer_type


class Llama4ForCausalLM(Decoder):
    has_interleaved_rope = True
    rope_defaults: ClassVar = {"rope_theta": 500_000.0}

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        shape = read_shape(hf, kv_heads=8, head_dim=128, eps=1e-5)
        if (top_k := whole_number(hf, "num_experts_per_tok", 1)) != 1:
            # with several, each would need an input of its own
            raise ModelLoadError(f"num_experts_per_tok is {top_k}; this family is supported with 1")
        return shape

    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_attention(f"{prefix}.self_attn", index),
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(f"{prefix}.feed_forward", index),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        hf, bias = self.hf, flag(self.hf, "attention_bias")
        turns = hf.get("no_rope_layers") or self._usual_turns()
        options: dict[str, Any] = {"qkv_bias": bias, "output_bias": bias}
        if not turns[index]:
            return self._without_positions(prefix, options)
        chunk = (
            None
            if hf.get("attention_chunk_size", 8192) is None
            else whole_number(hf, "attention_chunk_size", 8192)
        )
        kind = layer_type(hf, index, FULL if chunk is None else CHUNKED)
        return _NormAfterRotation(
            self.ctx,
            prefix,
            self.shape.hidden_size,
            self.shape.heads,
            rope=self.rope(),
            chunk=chunk if kind == CHUNKED else None,
            eps=self.shape.norm_eps if flag(hf, "use_qk_norm", True) else None,
            **options,
        )

    def _usual_turns(self) -> list[int]:
        period = whole_number(self.hf, "no_rope_layer_interval", 4)
        return [(index + 1) % period for index in range(self.shape.num_layers)]

    def _without_positions(self, prefix: str, options: dict[str, Any]) -> Layer:
        if not flag(self.hf, "attn_temperature_tuning", True):
            return self.self_attention(prefix, rope=None, **options)
        return _Tempered(
            self.ctx,
            prefix,
            self.shape.hidden_size,
            self.shape.heads,
            floor_scale=positive_number(self.hf, "floor_scale", 8192.0),
            attention_scale=positive_number(self.hf, "attn_scale", 0.1),
            **options,
        )

    def make_mlp(self, prefix: str, index: int) -> Layer:
        hf = self.hf
        step = whole_number(hf, "interleave_moe_layer_step", 1)
        with_experts = hf.get("moe_layers")
        if index not in (
            range(step - 1, self.shape.num_layers, step) if with_experts is None else with_experts
        ):
            return self.gated_mlp(prefix, whole_number(hf, "intermediate_size_mlp", 16384))
        routing = Routing(
            num_experts=whole_number(hf, "num_local_experts", 16), top_k=1, score="sigmoid", renormalize=False
        )
        tensors = StackedExperts(
            f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj", is_transposed=True
        )
        return SparseMoE(
            self.router(f"{prefix}.router", routing),
            self.experts(tensors, routing, self.shape.intermediate_size),
            self.gated_mlp(f"{prefix}.shared_expert"),
            weighs_input=True,
        )

    def own_name(self, name: str) -> str | None:
        """Checkpoints with a vision part have the text's tensors under a prefix."""
        if name.startswith(("vision_model.", "multi_modal_projector.")):
            return None
        return name.removeprefix("language_model.")


class _NormAfterRotation(SelfAttention):
    """With a norm without weight on each rotated head."""

    def __init__(self, *args: Any, eps: float | None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._eps = eps

    def place(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().place(q, k, positions)
        return (q, k) if self._eps is None else (self._normed(q), self._normed(k))

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self._eps)


class _Tempered(SelfAttention):
    """Queries grow with the logarithm of their position (arXiv:2501.19399)."""

    def __init__(self, *args: Any, floor_scale: float, attention_scale: float, **options: Any) -> None:
        super().__init__(*args, rope=None, **options)
        self._floor_scale = floor_scale
        self._attention_scale = attention_scale

    def place(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        steps = torch.floor((positions.float() + 1.0) / self._floor_scale)
        factors = torch.log1p(steps) * self._attention_scale + 1.0
        return (q * factors.view(-1, 1, 1)).to(q.dtype), k
