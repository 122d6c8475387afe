"""What is known of each architecture without importing its code: its family, what it does, what it keeps.

`tests/models` holds every line against the model itself. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    family: str
    features: tuple[str, ...] = ()
    """What sets it apart from a decoder of norm, attention, norm and gated feed-forward."""
    kv_specs: tuple[str, ...] = ("FullAttentionSpec",)
    """Classes of `inferplane.api.kv` that its layers may keep, depending on the configuration."""
    tested: tuple[str, ...] = ("random weights",)
    """What its answers are compared with transformers' on."""


_WINDOWED = ("FullAttentionSpec", "SlidingWindowSpec")
_HYBRID = ("FullAttentionSpec", "MambaSpec")
_LATENT = ("MLAAttentionSpec",)
_TRAINED = ("random weights", "trained weights")
_ENCODER = ("EncoderAttentionSpec",)
_BERT = ("learned positions", "norms behind", "no gate")

CATALOG: Mapping[str, ModelFacts] = {
    "BambaForCausalLM": ModelFacts("Bamba", ("state-space layers", "partial rotary"), _HYBRID),
    "BertForMaskedLM": ModelFacts("BERT", _BERT, _ENCODER),
    "BertForSequenceClassification": ModelFacts("BERT", _BERT, _ENCODER),
    "BertModel": ModelFacts("BERT", _BERT, _ENCODER, _TRAINED),
    "Cohere2ForCausalLM": ModelFacts(
        "Command", ("parallel blocks", "windows", "layers without positions"), _WINDOWED
    ),
    "CohereForCausalLM": ModelFacts("Command", ("parallel blocks",)),
    "DeepseekV2ForCausalLM": ModelFacts(
        "DeepSeek", ("latent attention", "experts", "shared experts"), _LATENT
    ),
    "DeepseekV3ForCausalLM": ModelFacts(
        "DeepSeek",
        ("latent attention", "experts", "shared experts", "sigmoid router"),
        _LATENT,
        _TRAINED,
    ),
    "FalconForCausalLM": ModelFacts("Falcon", ("parallel blocks", "fused projections")),
    "FalconH1ForCausalLM": ModelFacts(
        "Falcon-H1", ("state-space layers", "mixers side by side", "multipliers"), _HYBRID
    ),
    "Gemma2ForCausalLM": ModelFacts("Gemma", ("windows", "soft caps", "norms on both sides"), _WINDOWED),
    "Gemma3ForCausalLM": ModelFacts(
        "Gemma", ("windows", "norms on q and k", "norms on both sides"), _WINDOWED
    ),
    "GemmaForCausalLM": ModelFacts("Gemma", ("scaled embeddings",)),
    "Glm4ForCausalLM": ModelFacts("GLM", ("partial rotary", "norms on both sides")),
    "Glm4MoeForCausalLM": ModelFacts(
        "GLM", ("partial rotary", "experts", "shared experts", "sigmoid router")
    ),
    "GlmForCausalLM": ModelFacts("GLM", ("partial rotary",)),
    "GPT2LMHeadModel": ModelFacts("GPT-2", ("learned positions", "no gate")),
    "GPTNeoXForCausalLM": ModelFacts("GPT-NeoX", ("parallel blocks", "partial rotary", "no gate")),
    "GptOssForCausalLM": ModelFacts(
        "GPT-OSS", ("windows", "attention sinks", "experts"), _WINDOWED, _TRAINED
    ),
    "GraniteForCausalLM": ModelFacts("Granite", ("multipliers",)),
    "GraniteMoeForCausalLM": ModelFacts("Granite", ("multipliers", "experts")),
    "GraniteMoeHybridForCausalLM": ModelFacts(
        "Granite", ("state-space layers", "multipliers", "experts", "shared experts"), _HYBRID, _TRAINED
    ),
    "Lfm2ForCausalLM": ModelFacts(
        "LFM2", ("short convolutions", "norms on q and k"), ("FullAttentionSpec", "StateSpec")
    ),
    "JambaForCausalLM": ModelFacts(
        "Jamba", ("state-space layers", "layers without positions", "experts"), _HYBRID
    ),
    "Llama4ForCausalLM": ModelFacts(
        "Llama",
        ("chunks", "layers without positions", "experts", "shared experts"),
        ("ChunkedLocalSpec", "FullAttentionSpec"),
    ),
    "LlamaForCausalLM": ModelFacts("Llama", tested=_TRAINED),
    "LlamaForSequenceClassification": ModelFacts("Llama"),
    "LlamaModel": ModelFacts("Llama"),
    "Mamba2ForCausalLM": ModelFacts("Mamba", ("state-space layers", "no feed-forward"), ("MambaSpec",)),
    "MambaForCausalLM": ModelFacts("Mamba", ("state-space layers", "no feed-forward"), ("MambaSpec",)),
    "MistralForCausalLM": ModelFacts("Llama", ("windows",), _WINDOWED),
    "MistralForSequenceClassification": ModelFacts("Llama", ("windows",), _WINDOWED),
    "MistralModel": ModelFacts("Llama", ("windows",), _WINDOWED),
    "MixtralForCausalLM": ModelFacts("Mixtral", ("windows", "experts"), _WINDOWED, _TRAINED),
    "ModernBertForMaskedLM": ModelFacts("ModernBERT", ("windows",), _ENCODER),
    "ModernBertForSequenceClassification": ModelFacts("ModernBERT", ("windows",), _ENCODER),
    "ModernBertModel": ModelFacts("ModernBERT", ("windows",), _ENCODER),
    "NemotronHForCausalLM": ModelFacts(
        "Nemotron",
        ("state-space layers", "layers without positions", "one mixer a block", "no gate"),
        _HYBRID,
    ),
    "Olmo2ForCausalLM": ModelFacts("OLMo", ("norms behind", "norms on q and k")),
    "Olmo3ForCausalLM": ModelFacts("OLMo", ("windows", "norms behind", "norms on q and k"), _WINDOWED),
    "OlmoeForCausalLM": ModelFacts("OLMo", ("norms on q and k", "experts")),
    "Phi3ForCausalLM": ModelFacts("Phi", ("windows", "fused projections", "longrope"), _WINDOWED),
    "Qwen2ForCausalLM": ModelFacts("Qwen", ("windows",), _WINDOWED),
    "Qwen2ForSequenceClassification": ModelFacts("Qwen", ("windows",), _WINDOWED),
    "Qwen2Model": ModelFacts("Qwen", ("windows",), _WINDOWED),
    "Qwen2MoeForCausalLM": ModelFacts("Qwen", ("windows", "experts", "shared experts"), _WINDOWED),
    "Qwen3ForCausalLM": ModelFacts("Qwen", ("windows", "norms on q and k"), _WINDOWED),
    "Qwen3ForSequenceClassification": ModelFacts("Qwen", ("windows", "norms on q and k"), _WINDOWED),
    "Qwen3Model": ModelFacts("Qwen", ("windows", "norms on q and k"), _WINDOWED),
    "Qwen3MoeForCausalLM": ModelFacts("Qwen", ("windows", "norms on q and k", "experts"), _WINDOWED),
    "Qwen3NextForCausalLM": ModelFacts(
        "Qwen",
        (
            "delta-net layers",
            "gated attention",
            "partial rotary",
            "norms on q and k",
            "experts",
            "shared experts",
        ),
        ("FullAttentionSpec", "LinearAttentionSpec"),
        _TRAINED,
    ),
    "RobertaForMaskedLM": ModelFacts("RoBERTa", _BERT, _ENCODER),
    "RobertaForSequenceClassification": ModelFacts("RoBERTa", _BERT, _ENCODER),
    "RobertaModel": ModelFacts("RoBERTa", _BERT, _ENCODER),
    "Starcoder2ForCausalLM": ModelFacts("StarCoder", ("windows", "no gate"), _WINDOWED),
    "XLMRobertaForMaskedLM": ModelFacts("XLM-RoBERTa", _BERT, _ENCODER),
    "XLMRobertaForSequenceClassification": ModelFacts("XLM-RoBERTa", _BERT, _ENCODER),
    "XLMRobertaModel": ModelFacts("XLM-RoBERTa", _BERT, _ENCODER),
}
"""By Hugging Face architecture."""

OTHER_DECODERS = ModelFacts("any other decoder of transformers", ("fallback",), _WINDOWED)
"""Of `inferplane.models.fallback`."""


def is_encoder(architecture: str) -> bool:
    """Whether its tokens see those behind them."""
    return architecture in CATALOG and _ENCODER[0] in CATALOG[architecture].kv_specs
