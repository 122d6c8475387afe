"""Random small models that pool, written by transformers: encoders, and decoders without a head that generates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny_models

MAX_LEN = 96
SIZES: dict[str, Any] = {
    "vocab_size": tiny_models.VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_DECODER = {**SIZES, "num_key_value_heads": 2}
_MODERN = {
    **SIZES,
    "local_attention": 16,
    "global_attn_every_n_layers": 2,
    "cls_token_id": 1,
    "sep_token_id": 2,
}

POOLERS: dict[str, tuple[str, dict[str, Any]]] = {
    "BertModel": ("BertConfig", SIZES),
    "BertForMaskedLM": ("BertConfig", {**SIZES, "hidden_act": "gelu_new"}),
    "BertForSequenceClassification": ("BertConfig", {**SIZES, "num_labels": 3}),
    "XLMRobertaModel": ("XLMRobertaConfig", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "XLMRobertaForMaskedLM": ("XLMRobertaConfig", {**SIZES, "pad_token_id": 3, "type_vocab_size": 1}),
    "XLMRobertaForSequenceClassification": (
        "XLMRobertaConfig",
        {**SIZES, "pad_token_id": 1, "type_vocab_size": 1, "num_labels": 1},
    ),
    "RobertaModel": ("RobertaConfig", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "RobertaForMaskedLM": ("RobertaConfig", {**SIZES, "pad_token_id": 1, "type_vocab_size": 1}),
    "RobertaForSequenceClassification": (
        "RobertaConfig",
        {**SIZES, "pad_token_id": 1, "type_vocab_size": 1, "num_labels": 2},
    ),
    "ModernBertModel": ("ModernBertConfig", _MODERN),
    "ModernBertForMaskedLM": ("ModernBertConfig", {**_MODERN, "norm_bias": True, "attention_bias": True}),
    "ModernBertForSequenceClassification": (
        "ModernBertConfig",
        {**_MODERN, "num_labels": 4, "classifier_pooling": "mean", "classifier_bias": True, "mlp_bias": True},
    ),
    "LlamaModel": ("LlamaConfig", _DECODER),
    "LlamaForSequenceClassification": ("LlamaConfig", {**_DECODER, "num_labels": 3}),
    "MistralModel": ("MistralConfig", {**_DECODER, "sliding_window": 24}),
    "MistralForSequenceClassification": ("MistralConfig", {**_DECODER, "num_labels": 2}),
    "Qwen2Model": ("Qwen2Config", _DECODER),
    "Qwen2ForSequenceClassification": ("Qwen2Config", {**_DECODER, "num_labels": 3}),
    "Qwen3Model": ("Qwen3Config", {**_DECODER, "head_dim": 32}),
    "Qwen3ForSequenceClassification": ("Qwen3Config", {**_DECODER, "head_dim": 32, "num_labels": 1}),
}
"""By architecture the class of the configuration, and its fields."""


def make_tiny_pooler(
    architecture: str,
    directory: Path,
    *,
    seed: int = 0,
    pooling: str | None = None,
    normalize: bool = True,
    **overrides: Any,
) -> Path:
    """Writes a random model below `directory` and returns its folder. With `pooling` (``cls_token``, ``mean_tokens`` or
    ``lasttoken``) it has the files of sentence-transformers."""
    import torch
    import transformers

    config_class, fields = POOLERS[architecture]
    fields = {**fields, **overrides}
    if config_class in ("RobertaConfig", "XLMRobertaConfig"):
        # as published ones: positions begin behind the padding token's number
        fields["max_position_embeddings"] = MAX_LEN + fields["pad_token_id"] + 1
    config = getattr(transformers, config_class)(**fields)
    model = getattr(transformers, architecture)._from_config(config, dtype=torch.float32)
    tiny_models.randomize(model, seed)
    folder = directory / f"tiny-{architecture}-{seed}"
    model.save_pretrained(folder)
    tiny_models.write_tokenizer(folder)
    if pooling is not None:
        write_pooling(folder, pooling, normalize)
    return folder


def write_pooling(folder: Path, mode: str, normalize: bool = True) -> None:
    """As sentence-transformers writes it."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {
        f"pooling_mode_{name}": name == mode
        for name in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    }
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
