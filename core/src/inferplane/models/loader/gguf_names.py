"""What GGUF files call the tensors that Hugging Face checkpoints have, and which rows they reorder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inferplane.quantization.ggml import Bytes

_TOP_LEVEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS_ON_BOTH_SIDES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}

# They hold rope settings that are no parameters of the model; the configuration carries them.
ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,5})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class GGUFArchitecture:
    """How a family of models is laid out in GGUF files."""

    hf_architecture: str
    model_type: str
    has_interleaved_rope: bool = False
    """Rows of q and k are reordered so that the two halves of a rotated pair are neighbours."""
    has_qk_norm: bool = False
    has_norms_on_both_sides: bool = False
    """Of attention and of the feed-forward block."""
    norm_offset: float = 0.0
    """What files have added to the checkpoint's norm weights."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What every configuration of the family says and files do not."""

    def hf_name(self, name: str) -> str | None:
        """The Hugging Face name of a tensor; None for one that such a model does not have."""
        match = _BLOCK.fullmatch(name)
        if match:
            layer, part, kind = match.groups()
            hf_part = self._parts().get(part)
            return f"model.layers.{layer}.{hf_part}.{kind}" if hf_part else None
        stem, _, kind = name.rpartition(".")
        return f"{_TOP_LEVEL[stem]}.{kind}" if stem in _TOP_LEVEL and kind in ("weight", "bias") else None

    def _parts(self) -> Mapping[str, str]:
        qk_norm = _QK_NORM if self.has_qk_norm else {}
        norms = _NORMS_ON_BOTH_SIDES if self.has_norms_on_both_sides else {}
        return {**_IN_BLOCK, **qk_norm, **norms}

    def is_norm(self, name: str) -> bool:
        return name.endswith("_norm.weight")

    def is_reordered(self, name: str) -> bool:
        match = _BLOCK.fullmatch(name)
        return self.has_interleaved_rope and match is not None and match.group(2) in ("attn_q", "attn_k")


ARCHITECTURES = {
    "gemma3": GGUFArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        has_qk_norm=True,
        has_norms_on_both_sides=True,
        norm_offset=1.0,
        config={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", has_interleaved_rope=True),
    "mistral": GGUFArchitecture("MistralForCausalLM", "mistral", has_interleaved_rope=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", has_qk_norm=True),
}
"""By ``general.architecture``."""


def restore_row_order(rows: Bytes, num_heads: int) -> Bytes:
    """Undoes the reordering of q and k: rows ``(head, pair, half)`` become ``(head, half, pair)``.

    Rows are moved whole, so packed blocks stay as they are. ``rows: [num_heads * head_dim, ...]``.
    """
    by_pair = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(rows.shape)
