"""Writes the ``config.json`` and ``generation_config.json`` that a GGUF file stands for, from its metadata."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.gguf_names import ARCHITECTURES, GGUFArchitecture
from inferplane.models.loader.gguf_reader import GGUFReader, Metadata

_EOS_KEYS = ("eos", "eot", "eom")
_PLAIN_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}


def architecture_of(metadata: Metadata) -> GGUFArchitecture:
    name = metadata.text("general.architecture")
    found = ARCHITECTURES.get(name)
    if found is None:
        raise ModelLoadError(
            f"{metadata.path}: holds a model of architecture {name!r}; "
            f"GGUF files can be read for: {', '.join(ARCHITECTURES)}"
        )
    if metadata.optional_integer(f"{name}.expert_count"):
        raise ModelLoadError(
            f"{metadata.path}: {name}.expert_count is {metadata[f'{name}.expert_count']}; "
            "mixtures of experts cannot be read from GGUF files: use the safetensors checkpoint"
        )
    return found


def hf_config(reader: GGUFReader) -> dict[str, Any]:
    """The configuration in Hugging Face's names. Raises `ModelLoadError` naming the key that is missing or wrong."""
    metadata = reader.metadata
    architecture = architecture_of(metadata)
    sizes = _Sizes(reader)
    config: dict[str, Any] = {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.model_type,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.get("feed_forward_length"),
        "num_hidden_layers": sizes.get("block_count"),
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.get("attention.head_count_kv", sizes.num_heads),
        "head_dim": sizes.head_dim,
        "max_position_embeddings": sizes.get("context_length"),
        "vocab_size": _embedding_rows(reader),
        "rms_norm_eps": _epsilon(metadata),
        "tie_word_embeddings": "output.weight" not in reader.entries,
        # the bias of q, k and v alone is a matter of the architecture; this one says that the output has one too
        "attention_bias": "blk.0.attn_output.bias" in reader.entries,
        "mlp_bias": "blk.0.ffn_up.bias" in reader.entries,
        "sliding_window": metadata.optional_integer(sizes.key("attention.sliding_window")),
        "use_sliding_window": False,
        "rope_parameters": _rope_parameters(reader, sizes),
        **_special_ids(metadata),
    }
    config |= architecture.config
    if architecture.model_type == "gemma3_text":
        config |= _gemma3(config)
    dtype = _plain_dtype(reader)
    return config if dtype is None else {**config, "dtype": dtype}


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """Special ids, and the sampling defaults of files that carry them."""
    found: dict[str, Any] = _special_ids(metadata)
    for key, hf_key in _SAMPLING.items():
        value = _decimal(metadata, f"general.sampling.{key}")
        if value is not None:
            found[hf_key] = int(value) if key == "top_k" else value
    return found


def _gemma3(config: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with a window turn by a base of their own, unstretched. Queries are scaled by the size of a head, but of
    the hidden size's share in the model of 62 layers."""
    head_dim = config["head_dim"]
    if config["num_hidden_layers"] == 62:
        head_dim = config["hidden_size"] // config["num_attention_heads"]
    local = {"rope_type": "default", "rope_theta": 10_000.0}
    return {
        "query_pre_attn_scalar": head_dim,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


class _Sizes:
    """The positive integers of a model, by the part of their key after the architecture."""

    def __init__(self, reader: GGUFReader) -> None:
        self._metadata = reader.metadata
        self._prefix = reader.metadata.text("general.architecture")
        self.hidden = self.get("embedding_length")
        self.num_heads = self.get("attention.head_count")
        self.head_dim = self.get("attention.key_length", self.hidden // self.num_heads)

    def key(self, part: str) -> str:
        return f"{self._prefix}.{part}"

    def get(self, part: str, default: int | None = None) -> int:
        key = self.key(part)
        value = self._metadata.optional_integer(key)
        if value is None:
            value = self._metadata.integer(key) if default is None else default
        if not 0 < value < 1 << 31:
            raise ModelLoadError(f"{self._metadata.path}: {key} is {value}, which no model can have")
        return value


def _embedding_rows(reader: GGUFReader) -> int:
    entry = reader.entries.get("token_embd.weight")
    if entry is None:
        raise ModelLoadError(f"{reader.path}: has no tensor 'token_embd.weight'; the file is incomplete")
    return entry.shape[0]


def _epsilon(metadata: Metadata) -> float:
    key = f"{metadata.text('general.architecture')}.attention.layer_norm_rms_epsilon"
    epsilon = _decimal(metadata, key)
    if epsilon is None or not 0 <= epsilon < 1:
        raise ModelLoadError(f"{metadata.path}: {key} should be a small positive number, but is {epsilon}")
    return epsilon


def _decimal(metadata: Metadata, key: str) -> float | None:
    """A number as its author wrote it: files hold the float32 nearest to a short decimal one."""
    value = metadata.optional_number(key)
    narrow = np.float32(math.nan if value is None else value)
    return float(str(narrow)) if narrow == value else value


def _special_ids(metadata: Metadata) -> dict[str, Any]:
    def optional_id(name: str) -> int | None:
        return metadata.optional_integer(f"tokenizer.ggml.{name}_token_id")

    eos_ids = [found for name in _EOS_KEYS if (found := optional_id(name)) is not None]
    eos_ids = list(dict.fromkeys(eos_ids))
    ids = {
        "bos_token_id": optional_id("bos"),
        "eos_token_id": eos_ids[0] if len(eos_ids) == 1 else eos_ids or None,
        "pad_token_id": optional_id("padding"),
    }
    return {name: value for name, value in ids.items() if value is not None}


def _plain_dtype(reader: GGUFReader) -> str | None:
    """The type of the matrices where none is packed."""
    names = {entry.block_format.name for entry in reader.entries.values() if len(entry.shape) > 1}
    return _PLAIN_DTYPES.get(names.pop()) if len(names) == 1 else None


def _rope_parameters(reader: GGUFReader, sizes: _Sizes) -> dict[str, Any]:
    metadata = reader.metadata
    theta = _decimal(metadata, sizes.key("rope.freq_base"))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}
    rotary_dim = sizes.get("rope.dimension_count", sizes.head_dim)
    if rotary_dim != sizes.head_dim:
        rope["partial_rotary_factor"] = rotary_dim / sizes.head_dim
    rope |= _named_scaling(metadata, sizes)
    if "rope_freqs.weight" in reader.entries:
        factors = _tensor_values(reader, "rope_freqs.weight")
        rope |= _llama3_scaling(factors, rope["rope_theta"], rotary_dim) or _given_factors(
            factors, factors, sizes
        )
    elif "rope_factors_short.weight" in reader.entries and "rope_factors_long.weight" in reader.entries:
        short = _tensor_values(reader, "rope_factors_short.weight")
        rope |= _given_factors(short, _tensor_values(reader, "rope_factors_long.weight"), sizes)
        rope["original_max_position_embeddings"] = sizes.get("rope.scaling.original_context_length")
        rope["attention_factor"] = _decimal(metadata, sizes.key("rope.scaling.attn_factor")) or 1.0
    return rope


def _named_scaling(metadata: Metadata, sizes: _Sizes) -> dict[str, Any]:
    kind = metadata.optional_text(sizes.key("rope.scaling.type"))
    if kind in (None, "none", "longrope"):
        return {}
    if kind not in ("linear", "yarn"):
        raise ModelLoadError(
            f"{metadata.path}: rope scaling type {kind!r} is unknown; known: none, linear, yarn, longrope"
        )
    factor = _decimal(metadata, sizes.key("rope.scaling.factor"))
    if factor is None or not 1 <= factor < math.inf:
        raise ModelLoadError(
            f"{metadata.path}: {sizes.key('rope.scaling.factor')} should be at least 1, but is {factor}"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = sizes.get("rope.scaling.original_context_length")
        for key in ("beta_fast", "beta_slow"):
            value = _decimal(metadata, sizes.key(f"rope.scaling.yarn_{key}"))
            if value is not None:
                scaling[key] = value
    return scaling


def _tensor_values(reader: GGUFReader, name: str) -> list[float]:
    entry = reader.entries[name]
    values = reader.data(entry)
    if entry.block_format.name != "F32" or len(entry.shape) != 1:
        raise ModelLoadError(f"{reader.path}: tensor {name!r} should be a row of F32 numbers")
    factors = np.frombuffer(values.tobytes(), "<f4").tolist()
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelLoadError(f"{reader.path}: tensor {name!r} holds numbers that are no scale factors")
    return factors


def _llama3_scaling(factors: list[float], theta: float, rotary_dim: int) -> Mapping[str, Any] | None:
    """Settings of Llama 3 scaling that give these factors; None if the usual ones do not.

    The file keeps only what each frequency is divided by. The largest is the factor, and every model of the family
    was published with the other three settings as they stand here, which the factors then confirm.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = round(max(factors), 4)
    if len(factors) != rotary_dim // 2:
        return None
    wavelengths = 2 * math.pi * theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4):
        return None
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _given_factors(short: list[float], long: list[float], sizes: _Sizes) -> dict[str, Any]:
    """Any other division of the frequencies, as it is. The same list twice holds at every length."""
    return {
        "rope_type": "longrope",
        "short_factor": short,
        "long_factor": long,
        "attention_factor": 1.0,
        "original_max_position_embeddings": sizes.get("context_length"),
    }
