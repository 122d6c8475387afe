"""Bamba and Falcon-H1: state-space mixers with attention in some layers, or beside it in all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from inferplane.api.model import BuildContext, ForwardBatch
from inferplane.layers import GatedMLP, Layer, SequentialBlock
from inferplane.models.decoder import Decoder, Names
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, number
from inferplane.models.shape import Shape, read_shape
from inferplane.models.state_space import state_space_mixer


class BambaForCausalLM(Decoder):
    names = Names(norm="model.final_layernorm")
    rope_defaults: ClassVar = {"partial_rotary_factor": 0.5}

    @staticmethod
    def read_shape(hf: Mapping[str, Any]) -> Shape:
        return read_shape(hf, kv_heads=8, eps=1e-5)

    def make_block(self, prefix: str, index: int) -> Layer:
        return SequentialBlock(
            attention_norm=self.make_norm(f"{prefix}.input_layernorm"),
            attention=self.make_mixer(prefix, index),
            mlp_norm=self.make_norm(f"{prefix}.pre_ff_layernorm"),
            mlp=self.make_mlp(f"{prefix}.feed_forward", index),
        )

    def make_mixer(self, prefix: str, index: int) -> Layer:
        with_attention = self.hf.get("attn_layer_indices") or []
        if not isinstance(with_attention, list):
            raise ModelLoadError(f"attn_layer_indices should be a list of layers, but is {with_attention!r}")
        if index in with_attention:
            return self.make_attention(f"{prefix}.self_attn", index)
        return state_space_mixer(self.ctx, f"{prefix}.mamba", self.shape.hidden_size, self.shape.norm_eps)

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        return self.gated_mlp(prefix, bias=flag(self.hf, "mlp_bias"))


class FalconH1ForCausalLM(BambaForCausalLM):
    """With factors on what enters and leaves each part."""

    rope_defaults: ClassVar = {}

    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        self.embedding_multiplier = number(self.hf, "embedding_multiplier", 1.0)
        self.logits_multiplier = number(self.hf, "lm_head_multiplier", 1.0)

    def make_mixer(self, prefix: str, index: int) -> Layer:
        hf, shape = self.hf, self.shape
        has_norm = flag(hf, "mamba_rms_norm")
        if has_norm and flag(hf, "mamba_norm_before_gate", True):
            raise ModelLoadError("mamba_norm_before_gate is true; only a norm behind the gate is supported")
        mixer = state_space_mixer(
            self.ctx,
            f"{prefix}.mamba",
            shape.hidden_size,
            shape.norm_eps,
            inner_size=hf.get("mamba_d_ssm", 1024),
            has_norm=has_norm,
            scales=_factors(hf, "ssm_multipliers", 5),
        )
        return _BothMixers(
            mixer,
            self.make_attention(f"{prefix}.self_attn", index),
            inputs=(number(hf, "ssm_in_multiplier", 1.0), number(hf, "attention_in_multiplier", 1.0)),
            outputs=(number(hf, "ssm_out_multiplier", 1.0), number(hf, "attention_out_multiplier", 1.0)),
        )

    def make_attention(self, prefix: str, index: int) -> Layer:
        bias = flag(self.hf, "attention_bias")
        scale = self.shape.heads.head_dim**-0.5 * number(self.hf, "key_multiplier", 1.0)
        return self.self_attention(prefix, qkv_bias=bias, output_bias=bias, scale=scale)

    def make_mlp(self, prefix: str, index: int) -> Layer:
        mlp = self.gated_mlp(prefix, bias=flag(self.hf, "mlp_bias"))
        return _ScaledMLP(mlp, *_factors(self.hf, "mlp_multipliers", 2))

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        return super().embed(batch) * self.embedding_multiplier

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().compute_logits(hidden) * self.logits_multiplier


class _BothMixers(Layer):
    """The sum of a state-space mixer and attention over the same input, each with its factors."""

    def __init__(
        self,
        state_space: Layer,
        attention: Layer,
        inputs: tuple[float, float],
        outputs: tuple[float, float],
    ) -> None:
        self.state_space = state_space
        self.attention = attention
        self._inputs = inputs
        self._outputs = outputs

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        states, keys = (hidden * factor for factor in self._inputs)
        return (
            self.state_space(states, batch) * self._outputs[0]
            + self.attention(keys, batch) * self._outputs[1]
        )


class _ScaledMLP(Layer):
    """A factor on the gate before its activation, and one on the result."""

    def __init__(self, mlp: GatedMLP, gate_factor: float, output_factor: float) -> None:
        self.mlp = mlp
        self._gate_factor = gate_factor
        self._output_factor = output_factor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.mlp.gate_up_proj(hidden).chunk(2, dim=-1)
        inner = self.mlp.act(torch.cat([gate * self._gate_factor, up], dim=-1))
        return self.mlp.down_proj(inner) * self._output_factor


def _factors(hf: Mapping[str, Any], key: str, length: int) -> Sequence[float]:
    """Of the parts of one product, 1 where the configuration lacks them."""
    values = hf.get(key)
    values = [1.0] * length if values is None else values
    if not isinstance(values, (list, tuple)) or len(values) != length:
        raise ModelLoadError(f"{key} should be a list of {length} numbers, but is {values!r}")
    return [number({key: value}, key, 1.0) for value in values]
