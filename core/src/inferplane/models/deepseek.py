"""DeepSeek V2 and V3: attention over a latent, and after some dense layers many small experts with shared ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from inferplane.layers import LatentAttention, LatentShape, Layer, Routing, SeparateExperts, SparseMoE
from inferplane.layers.rope import RotaryEmbedding
from inferplane.models.decoder import Decoder
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, text, whole_number
from inferplane.models.rope_config import RopeConfig, rope_config
from inferplane.models.shape import Shape, read_shape


class DeepseekV3ForCausalLM(Decoder):
    dense_by_default = 3

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        # the part of a head that positions turn; LatentShape has the others
        return read_shape(
            {**hf, "num_key_value_heads": None, "head_dim": whole_number(hf, "qk_rope_head_dim", 64)}
        )

    @property
    def has_interleaved_rope(self) -> bool:  # type: ignore[override]
        return flag(self.hf, "rope_interleave", True)

    def make_attention(self, prefix: str, index: int) -> Layer:
        hf = self.hf
        q_rank = None if hf.get("q_lora_rank", 1536) is None else whole_number(hf, "q_lora_rank", 1536)
        shape = LatentShape(
            num_heads=self.shape.heads.num_heads,
            q_rank=q_rank,
            kv_rank=whole_number(hf, "kv_lora_rank", 512),
            nope_dim=whole_number(hf, "qk_nope_head_dim", 128),
            rope_dim=self.shape.heads.head_dim,
            v_dim=whole_number(hf, "v_head_dim", 128),
        )
        rope: RotaryEmbedding = self.rope()
        config = rope_config(hf, head_dim=shape.rope_dim)
        scale = (shape.nope_dim + shape.rope_dim) ** -0.5 * _stretched_scale(config)
        size, bias = self.shape.hidden_size, flag(hf, "attention_bias")
        return LatentAttention(self.ctx, prefix, size, shape, rope=rope, scale=scale, bias=bias)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        hf = self.hf
        if index < whole_number(hf, "first_k_dense_replace", self.dense_by_default, least=0):
            return self.gated_mlp(prefix)
        routing = self.routing()
        inner = whole_number(hf, "moe_intermediate_size", 2048)
        num_shared = whole_number(hf, "n_shared_experts", 1, least=0)
        return SparseMoE(
            self.router(f"{prefix}.gate", routing, dtype="float32"),
            self.experts(SeparateExperts(f"{prefix}.experts"), routing, inner),
            self.gated_mlp(f"{prefix}.shared_experts", num_shared * inner) if num_shared else None,
        )

    def routing(self) -> Routing:
        """Sigmoid scores, a bias for the choice alone, groups that count by their two best."""
        hf = self.hf
        return Routing(
            num_experts=whole_number(hf, "n_routed_experts", 256),
            top_k=whole_number(hf, "num_experts_per_tok", 8),
            score="sigmoid",
            renormalize=flag(hf, "norm_topk_prob", True),
            scale=positive_number(hf, "routed_scaling_factor", 2.5),
            num_groups=whole_number(hf, "n_group", 8),
            top_groups=whole_number(hf, "topk_group", 4),
            best_of_group=2,
            has_selection_bias=True,
        )

    def own_name(self, name: str) -> str | None:
        """Layers behind the last are for multi-token prediction, which no answer needs."""
        return None if self.is_extra_layer(name) else name


class DeepseekV2ForCausalLM(DeepseekV3ForCausalLM):
    dense_by_default = 0

    @property
    def has_interleaved_rope(self) -> bool:  # type: ignore[override]
        return True

    def routing(self) -> Routing:
        """Softmax scores, groups that count by their best, weights as they are."""
        hf = self.hf
        method = text(hf, "topk_method", "greedy")
        if method not in ("greedy", "group_limited_greedy"):
            raise ModelLoadError(f"topk_method is {method!r}; known: greedy, group_limited_greedy")
        has_groups = method == "group_limited_greedy"
        return Routing(
            num_experts=whole_number(hf, "n_routed_experts", 64),
            top_k=whole_number(hf, "num_experts_per_tok"),
            renormalize=False,
            scale=positive_number(hf, "routed_scaling_factor", 1.0),
            num_groups=whole_number(hf, "n_group", 1) if has_groups else 1,
            top_groups=whole_number(hf, "topk_group", 1) if has_groups else 1,
        )


def _stretched_scale(config: RopeConfig) -> float:
    """Stretched positions sharpen the attention where ``mscale_all_dim`` says so."""
    if config.rope_type == "default" or not config.mscale_all_dim or config.factor <= 1:
        return 1.0
    return (0.1 * config.mscale_all_dim * math.log(config.factor) + 1.0) ** 2
