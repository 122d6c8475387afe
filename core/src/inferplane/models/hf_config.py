"""A configuration's quirks of form, put right once: what follows reads one table of the usual keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferplane.models.hf_fields import whole_number

_USUAL_NAMES = {
    "n_embd": "hidden_size",
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
    "layers_block_type": "layer_types",
    "global_rope_theta": "rope_theta",
    "local_rope_theta": "rope_local_base_freq",
}
_PADDED_POSITIONS = ("camembert", "roberta", "xlm-roberta", "xlm-roberta-xl")
"""Types of models that count positions from behind the number of their padding token."""
_OUTER = ("architectures", "quantization_config", "tie_word_embeddings", "dtype", "torch_dtype")


def usual_form(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration with older names replaced by those of today.

    Of a model that has more than text, what concerns the text is put in the place of the whole.
    """
    config = {key: _plain(value) for key, value in hf_config.items()}
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**{key: config[key] for key in _OUTER if key in config}, **text}
        config["architectures"] = hf_config.get("architectures")
    for name, usual in _USUAL_NAMES.items():
        if name in config and config.get(usual) is None:
            config[usual] = config[name]
    if config.get("model_type") in _PADDED_POSITIONS and "position_offset" not in config:
        offset = whole_number(config, "pad_token_id", 1, least=0) + 1
        config["position_offset"] = offset
        config["max_position_embeddings"] = whole_number(config, "max_position_embeddings", 514) - offset
    return config


def _plain(value: Any) -> Any:
    """Numbers that JSON does not have are written as ``{"__float__": "Infinity"}``."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list) else value
