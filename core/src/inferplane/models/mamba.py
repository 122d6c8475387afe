"""Mamba and Mamba 2: state-space mixers in place of attention, and no feed-forward between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.layers import Heads, Layer, MixerBlock, SelectiveScanMixer, SelectiveShape, StateSpaceMixer
from inferplane.models.decoder import Decoder, Names
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.shape import Shape
from inferplane.models.state_space import check_silu, step_limits, step_rank


class MambaForCausalLM(Decoder):
    names = Names(embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f")

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        expanded = whole_number(hf, "expand", 2) * whole_number(hf, "hidden_size")
        inner = whole_number(hf, "intermediate_size", expanded)
        return _shape(hf, Heads(1, 1, inner), is_tied=True)

    def make_block(self, prefix: str, index: int) -> Layer:
        hf, hidden_size = self.hf, self.shape.hidden_size
        check_silu(hf)
        shape = SelectiveShape(
            inner_size=self.shape.intermediate_size,
            state_size=whole_number(hf, "state_size", 16),
            step_rank=step_rank(hf, "time_step_rank", hidden_size),
            conv_width=whole_number(hf, "conv_kernel", 4),
        )
        mixer = SelectiveScanMixer(
            self.ctx,
            f"{prefix}.mixer",
            hidden_size,
            shape,
            bias=flag(hf, "use_bias"),
            conv_bias=flag(hf, "use_conv_bias", True),
        )
        return MixerBlock(self.make_norm(f"{prefix}.norm"), mixer)


class Mamba2ForCausalLM(Decoder):
    names = Names(embedding="backbone.embeddings", layers="backbone.layers", norm="backbone.norm_f")

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        num_heads, head_dim = whole_number(hf, "num_heads", 128), whole_number(hf, "head_dim", 64)
        return _shape(hf, Heads(num_heads, num_heads, head_dim))

    def make_block(self, prefix: str, index: int) -> Layer:
        hf, heads = self.hf, self.shape.heads
        check_silu(hf)
        mixer = StateSpaceMixer(
            self.ctx,
            f"{prefix}.mixer",
            self.shape.hidden_size,
            num_heads=heads.num_heads,
            head_dim=heads.head_dim,
            num_groups=whole_number(hf, "n_groups", 8),
            state_size=whole_number(hf, "state_size", 128),
            conv_width=whole_number(hf, "conv_kernel", 4),
            eps=self.shape.norm_eps,
            bias=flag(hf, "use_bias"),
            conv_bias=flag(hf, "use_conv_bias", True),
            step_limits=step_limits(hf),
        )
        return MixerBlock(self.make_norm(f"{prefix}.norm"), mixer)


def _shape(hf: Mapping[str, Any], heads: Heads, *, is_tied: bool = False) -> Shape:
    return Shape(
        vocab_size=whole_number(hf, "vocab_size"),
        hidden_size=whole_number(hf, "hidden_size"),
        intermediate_size=heads.num_heads * heads.head_dim,
        num_layers=whole_number(hf, "num_hidden_layers"),
        heads=heads,
        norm_eps=positive_number(hf, "layer_norm_epsilon", 1e-5),
        activation="silu",
        has_tied_embeddings=flag(hf, "tie_word_embeddings", is_tied),
    )
