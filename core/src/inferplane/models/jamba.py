"""Jamba: selective scans in most layers, attention without positions in some, experts in every other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.layers import (
    Layer,
    Routing,
    SelectiveScanMixer,
    SelectiveShape,
    SeparateExperts,
    SequentialBlock,
    SparseMoE,
)
from inferplane.models.decoder import Decoder, Names
from inferplane.models.hf_fields import flag, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.sparse import num_experts_of
from inferplane.models.state_space import check_silu, step_rank


class JambaForCausalLM(Decoder):
    names = Names(norm="model.final_layernorm")

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=8)

    def make_block(self, prefix: str, index: int) -> Layer:
        is_full = self._is_turn(index, "attn_layer", period=8, offset=4)
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.self_attention(f"{prefix}.self_attn", rope=None)
            if is_full
            else self.make_mixer(f"{prefix}.mamba"),
            mlp_norm=self.make_norm(f"{prefix}.pre_ff_layernorm"),
            mlp=self.make_mlp(f"{prefix}.feed_forward", index),
        )

    def _is_turn(self, index: int, key: str, *, period: int, offset: int) -> bool:
        period = whole_number(self.hf, f"{key}_period", period)
        return index % period == whole_number(self.hf, f"{key}_offset", offset, least=0)

    def make_mixer(self, prefix: str) -> Layer:
        hf, hidden_size = self.hf, self.shape.hidden_size
        check_silu(hf)
        shape = SelectiveShape(
            inner_size=whole_number(hf, "mamba_expand", 2) * hidden_size,
            state_size=whole_number(hf, "mamba_d_state", 16),
            step_rank=step_rank(hf, "mamba_dt_rank", hidden_size),
            conv_width=whole_number(hf, "mamba_d_conv", 4),
        )
        return SelectiveScanMixer(
            self.ctx,
            prefix,
            hidden_size,
            shape,
            bias=flag(hf, "mamba_proj_bias"),
            conv_bias=flag(hf, "mamba_conv_bias", True),
            norms=(
                self.make_norm(f"{prefix}.dt_layernorm", shape.step_rank),
                self.make_norm(f"{prefix}.b_layernorm", shape.state_size),
                self.make_norm(f"{prefix}.c_layernorm", shape.state_size),
            ),
        )

    def make_mlp(self, prefix: str, index: int) -> Layer:
        num_experts = num_experts_of(self.hf, 16)
        if num_experts <= 1 or not self._is_turn(index, "expert_layer", period=2, offset=1):
            return self.gated_mlp(prefix)
        top_k = whole_number(self.hf, "num_experts_per_tok", 2)
        routing = Routing(num_experts=num_experts, top_k=top_k, renormalize=False)
        return SparseMoE(
            self.router(f"{prefix}.router", routing),
            self.experts(SeparateExperts(f"{prefix}.experts"), routing, self.shape.intermediate_size),
        )
