"""Nemotron-H: blocks of one mixer each, which is a state space, attention without positions, or a feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from inferplane.api.model import ForwardBatch
from inferplane.layers import Layer, MixerBlock, StateSpaceMixer
from inferplane.models.decoder import Decoder, Names
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.state_space import check_silu

_BY_LETTER = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_OTHER_NAMES = {"mamba": "linear_attention", "attention": "full_attention"}


class NemotronHForCausalLM(Decoder):
    names = Names(embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f")

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        settings = {**hf, "num_hidden_layers": len(_mixers(hf))}
        return read_shape(
            settings,
            kv_heads=8,
            head_dim=128,
            eps_key="layer_norm_epsilon",
            eps=1e-5,
            activation_key="mlp_hidden_act",
            activation="relu2",
        )

    def make_block(self, prefix: str, index: int) -> Layer:
        make = {
            "linear_attention": self.make_state_space,
            "full_attention": self.make_attention_of_block,
            "mlp": self.make_feed_forward,
        }
        kind = _mixers(self.hf)[index]
        if kind not in make:
            raise ModelLoadError(f"layer {index} is of type {kind!r}; known: {', '.join(make)}")
        return MixerBlock(self.make_norm(f"{prefix}.norm"), make[kind](f"{prefix}.mixer"))

    def make_state_space(self, prefix: str) -> Layer:
        hf = self.hf
        check_silu(hf, "mamba_hidden_act")
        return StateSpaceMixer(
            self.ctx,
            prefix,
            self.shape.hidden_size,
            num_heads=whole_number(hf, "mamba_num_heads", 128),
            head_dim=whole_number(hf, "mamba_head_dim", 64),
            num_groups=whole_number(hf, "n_groups", 8),
            state_size=whole_number(hf, "ssm_state_size", 128),
            conv_width=whole_number(hf, "conv_kernel", 4),
            eps=self.shape.norm_eps,
            bias=flag(hf, "use_bias"),
            conv_bias=flag(hf, "use_conv_bias", True),
            step_limits=(positive_number(hf, "time_step_min", 0.001), float("inf")),
        )

    def make_attention_of_block(self, prefix: str) -> Layer:
        return self.self_attention(prefix, rope=None)

    def make_feed_forward(self, prefix: str) -> Layer:
        bias = flag(self.hf, "mlp_bias")
        return _FeedForward(self.mlp(prefix, "up_proj", "down_proj", bias=bias))

    def own_name(self, name: str) -> str | None:
        """Tensors for multi-token prediction are needed by no answer."""
        return None if name.startswith("mtp.") else name


class _FeedForward(Layer):
    """A mixer that sees no other token."""

    def __init__(self, mlp: Layer) -> None:
        self.mlp = mlp

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.mlp(hidden)


def _mixers(hf: Mapping[str, Any]) -> list[str]:
    """Of each block: letters in older configurations, a list of names in newer ones."""
    pattern, types = hf.get("hybrid_override_pattern"), hf.get("layer_types")
    if isinstance(pattern, str):
        types = [_BY_LETTER.get(letter, letter) for letter in pattern]
    if not isinstance(types, list) or not types:
        raise ModelLoadError(f"layers_block_type should be a list of the blocks' types, but is {types!r}")
    return [_OTHER_NAMES.get(str(kind), str(kind)) for kind in types]
