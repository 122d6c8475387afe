"""Qwen3-Next: gated delta nets in most layers, gated full attention in every fourth, experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from inferplane.layers import DeltaHeads, GatedDeltaNet, Layer, Norm, RMSNorm, SequentialBlock
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.sparse import Qwen2MoeForCausalLM
from inferplane.models.state_space import check_silu
from inferplane.models.windows import FULL, LINEAR, mixer_type


class Qwen3NextForCausalLM(Qwen2MoeForCausalLM):
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.25}
    expert_defaults: ClassVar = {
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    }

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=2, head_dim=256)

    def make_norm(self, prefix: str, size: int | None = None) -> Norm:
        size = size or self.shape.hidden_size
        return RMSNorm(self.ctx, prefix, size, self.shape.norm_eps, weight_offset=1.0)

    def make_block(self, prefix: str, index: int) -> Layer:
        period = whole_number(self.hf, "full_attention_interval", 4)
        usual = LINEAR if (index + 1) % period else FULL
        has_state = mixer_type(self.hf, index, usual) == LINEAR
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_delta_net(f"{prefix}.linear_attn")
            if has_state
            else self.make_attention(f"{prefix}.self_attn", index),
            mlp_norm=self.make_norm(f"{prefix}.post_attention_layernorm"),
            mlp=self.make_mlp(f"{prefix}.mlp", index),
        )

    def make_delta_net(self, prefix: str) -> Layer:
        hf = self.hf
        check_silu(hf)
        heads = DeltaHeads(
            num_key_heads=whole_number(hf, "linear_num_key_heads", 16),
            num_value_heads=whole_number(hf, "linear_num_value_heads", 32),
            key_dim=whole_number(hf, "linear_key_head_dim", 128),
            value_dim=whole_number(hf, "linear_value_head_dim", 128),
        )
        if heads.num_value_heads % heads.num_key_heads:
            raise ModelLoadError(
                f"linear_num_value_heads {heads.num_value_heads} should be a multiple of "
                f"linear_num_key_heads {heads.num_key_heads}"
            )
        return GatedDeltaNet(
            self.ctx,
            prefix,
            self.shape.hidden_size,
            heads,
            conv_width=whole_number(hf, "linear_conv_kernel_dim", 4),
            eps=self.shape.norm_eps,
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        norms = self.head_norms(prefix)
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias, has_output_gate=True, **norms)

    def own_name(self, name: str) -> str | None:
        """Tensors for multi-token prediction are needed by no answer."""
        return None if name.startswith("mtp.") else name
