"""The Llama family: Llama, Mistral, Qwen2 and Qwen3.

One decoder serves them all. What sets a family apart is said in its class at the end of the file, as the
`Settings` that it reads from ``config.json``; keys that are missing there mean what they mean to transformers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from inferplane.api.attention import AttentionLayer
from inferplane.api.model import BuildContext, ForwardBatch, Model
from inferplane.layers import (
    Attention,
    GatedMLP,
    Layer,
    ParallelLMHead,
    QKVParallelLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    walk_layers,
)
from inferplane.models.errors import ModelLoadError
from inferplane.models.hf_fields import flag, positive_number, whole_number
from inferplane.models.rope_config import rope_config
from inferplane.models.weights import load_weights


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The shape of one decoder, over all ranks."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    has_tied_embeddings: bool
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    sliding_window: int | None
    """Tokens that a layer with a window looks back on; None where no layer has one."""


def read_settings(
    hf: Mapping[str, Any],
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    sliding_window: int | None = None,
) -> Settings:
    """``kv_heads`` and ``head_dim`` are what the family takes where the configuration lacks the key."""
    if (activation := hf.get("hidden_act", "silu")) != "silu":
        raise ModelLoadError(f"hidden_act {activation!r} is not supported by this family; silu is")
    hidden_size = whole_number(hf, "hidden_size")
    num_heads = whole_number(hf, "num_attention_heads")
    # null means one for each query head in every family, a missing key only in some
    default_kv_heads = num_heads if kv_heads is None or "num_key_value_heads" in hf else kv_heads
    num_kv_heads = whole_number(hf, "num_key_value_heads", default_kv_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"{num_heads} attention heads cannot share {num_kv_heads} KV heads evenly")
    return Settings(
        vocab_size=whole_number(hf, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=whole_number(hf, "intermediate_size"),
        num_layers=whole_number(hf, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=whole_number(hf, "head_dim", head_dim or hidden_size // num_heads),
        rms_norm_eps=positive_number(hf, "rms_norm_eps", 1e-6),
        has_tied_embeddings=flag(hf, "tie_word_embeddings"),
        has_qkv_bias=qkv_bias,
        has_output_bias=output_bias,
        has_mlp_bias=mlp_bias,
        has_qk_norm=qk_norm,
        sliding_window=sliding_window,
    )


class LlamaAttention(Layer):
    def __init__(self, ctx: BuildContext, prefix: str, settings: Settings, rope: RotaryEmbedding) -> None:
        size, head_dim, eps = settings.hidden_size, settings.head_dim, settings.rms_norm_eps
        self.qkv_proj = QKVParallelLinear(
            ctx,
            prefix,
            size,
            num_heads=settings.num_heads,
            num_kv_heads=settings.num_kv_heads,
            head_dim=head_dim,
            bias=settings.has_qkv_bias,
        )
        num_heads, num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.split = (num_heads, num_kv_heads, num_kv_heads)
        self.head_shape = (-1, sum(self.split), head_dim)
        self.q_norm = RMSNorm(ctx, f"{prefix}.q_norm", head_dim, eps) if settings.has_qk_norm else None
        self.k_norm = RMSNorm(ctx, f"{prefix}.k_norm", head_dim, eps) if settings.has_qk_norm else None
        self.rope = rope
        self.attention = Attention(
            ctx, prefix, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        self.o_proj = RowParallelLinear(
            ctx, f"{prefix}.o_proj", settings.num_heads * head_dim, size, bias=settings.has_output_bias
        )

    def __call__(self, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        qkv = self.qkv_proj(hidden).view(self.head_shape)
        q, k, v = qkv.split_with_sizes(self.split, 1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, batch.positions)
        return self.o_proj(self.attention(q, k, v, batch).flatten(1))


class LlamaDecoderLayer(Layer):
    """Takes and returns ``(hidden, residual)``, whose sum is left to the next norm, which makes both in one op."""

    def __init__(self, ctx: BuildContext, prefix: str, settings: Settings, rope: RotaryEmbedding) -> None:
        size, eps = settings.hidden_size, settings.rms_norm_eps
        self.input_layernorm = RMSNorm(ctx, f"{prefix}.input_layernorm", size, eps)
        self.self_attn = LlamaAttention(ctx, f"{prefix}.self_attn", settings, rope)
        self.post_attention_layernorm = RMSNorm(ctx, f"{prefix}.post_attention_layernorm", size, eps)
        self.mlp = GatedMLP(
            ctx, f"{prefix}.mlp", size, settings.intermediate_size, bias=settings.has_mlp_bias
        )

    def __call__(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = self.input_layernorm.add(hidden, residual)
        hidden = self.self_attn(hidden, batch)
        hidden, residual = self.post_attention_layernorm.add(hidden, residual)
        return self.mlp(hidden), residual


class LlamaForCausalLM(Model):
    def __init__(self, ctx: BuildContext, prefix: str = "") -> None:
        super().__init__(ctx, prefix)
        settings = self.settings(ctx.hf_config)
        _check_window(settings, ctx.config.model.max_model_len)
        root = f"{prefix}." if prefix else ""
        size, vocab_size = settings.hidden_size, settings.vocab_size
        self.embed_tokens = VocabParallelEmbedding(ctx, f"{root}model.embed_tokens", vocab_size, size)
        rope = RotaryEmbedding(ctx, rope_config(ctx.hf_config, head_dim=settings.head_dim))
        self.layers = [
            LlamaDecoderLayer(ctx, f"{root}model.layers.{index}", settings, rope)
            for index in range(settings.num_layers)
        ]
        self.norm = RMSNorm(ctx, f"{root}model.norm", size, settings.rms_norm_eps)
        tied_to = self.embed_tokens if settings.has_tied_embeddings else None
        self.lm_head = ParallelLMHead(ctx, f"{root}lm_head", vocab_size, size, tied_to)

    @staticmethod
    def settings(hf: Mapping[str, Any]) -> Settings:
        bias = flag(hf, "attention_bias")
        return read_settings(hf, qkv_bias=bias, output_bias=bias, mlp_bias=flag(hf, "mlp_bias"))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        hidden, residual = self.embed_tokens(batch.token_ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual, batch)
        return self.norm.add(hidden, residual)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        load_weights(self, tensors)

    def attention_layers(self) -> list[AttentionLayer]:
        return [layer.description for layer in walk_layers(self) if isinstance(layer, Attention)]


class MistralForCausalLM(LlamaForCausalLM):
    @staticmethod
    def settings(hf: Mapping[str, Any]) -> Settings:
        return read_settings(hf, kv_heads=8, sliding_window=_window_size(hf))


class Qwen2ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def settings(hf: Mapping[str, Any]) -> Settings:
        return read_settings(hf, kv_heads=32, qkv_bias=True, sliding_window=_qwen_window(hf))


class Qwen3ForCausalLM(LlamaForCausalLM):
    @staticmethod
    def settings(hf: Mapping[str, Any]) -> Settings:
        bias, window = flag(hf, "attention_bias"), _qwen_window(hf)
        biases = {"qkv_bias": bias, "output_bias": bias}
        return read_settings(hf, kv_heads=32, head_dim=128, qk_norm=True, sliding_window=window, **biases)


def _window_size(hf: Mapping[str, Any]) -> int | None:
    """A missing key is a window of 4096 tokens to transformers, null is none."""
    return None if hf.get("sliding_window", 4096) is None else whole_number(hf, "sliding_window", 4096)


def _qwen_window(hf: Mapping[str, Any]) -> int | None:
    """Qwen's windows are off unless asked for, and then only in the layers from ``max_window_layers`` on."""
    if not flag(hf, "use_sliding_window"):
        return None
    layer_types = hf.get("layer_types")
    if layer_types is None:
        num_full = whole_number(hf, "max_window_layers", 28, least=0)
        has_window = num_full < whole_number(hf, "num_hidden_layers")
    else:
        has_window = "sliding_attention" in layer_types
    return _window_size(hf) if has_window else None


def _check_window(settings: Settings, max_model_len: int) -> None:
    """Within its window a layer sees every token, as with full attention, which is all there is."""
    window = settings.sliding_window
    if window is not None and max_model_len > window:
        raise ModelLoadError(
            f"sliding_window is {window} tokens and max_model_len {max_model_len}: attention with a window is not "
            f"supported beyond it; set max_model_len to {window} or less"
        )
