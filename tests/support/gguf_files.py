"""GGUF files for tests, written by the `gguf` package: an independent hand on the other side of our reader."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Tensors = Mapping[str, np.ndarray]
CONTROL, USER_DEFINED, NORMAL, UNKNOWN, BYTE = 3, 4, 1, 2, 6


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Tensors | None = None,
    quantization: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """`metadata` holds texts, numbers, booleans and lists; tensors are float32, matrices packed as `quantization`."""
    writer = gguf.GGUFWriter(path, arch=metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, values in (tensors or {}).items():
        if quantization is None or values.ndim == 1:
            writer.add_tensor(name, values)
        else:
            packed = gguf.quantize(values, quantization)
            writer.add_tensor(name, packed, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def config_metadata(config: Mapping[str, Any], arch: str) -> dict[str, Any]:
    """What a converter writes of a Hugging Face configuration."""
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    window = config.get("sliding_window")
    return {
        **({f"{arch}.attention.sliding_window": window} if arch == "gemma3" else {}),
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": float(rope["rope_theta"]),
        f"{arch}.rope.dimension_count": head_dim,
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
    }


_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


_GEMMA3_PARTS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(hf_name: str, arch: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    parts = {**_PARTS, **_GEMMA3_PARTS} if arch == "gemma3" else _PARTS
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{parts[part]}.{kind}"
    return f"{parts[stem]}.{kind}"


def interleaved(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q or k as llama files hold them: within a head, row `2 i + h` is row `h * head_dim / 2 + i`."""
    head_dim = len(values) // num_heads
    half = head_dim // 2
    order = [
        head * head_dim + h * half + i for head in range(num_heads) for i in range(half) for h in range(2)
    ]
    return values[order]


def folder_to_gguf(
    folder: Path, path: Path, arch: str, quantization: gguf.GGMLQuantizationType | None = None
) -> Path:
    """The float32 safetensors folder of a llama, qwen2, qwen3 or gemma3 model as a GGUF file, without its tokenizer."""
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if arch == "llama" and ".q_proj." in name:
            values = interleaved(values, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            values = interleaved(values, config["num_key_value_heads"])
        if arch == "gemma3" and "norm" in name:
            values = values + np.float32(1)
        tensors[gguf_name(name, arch)] = values
    return write_gguf(path, config_metadata(config, arch), tensors, quantization)


def bpe_metadata(
    tokenizer_json: Mapping[str, Any], pre: str, special: Sequence[str] = (), user_defined: Sequence[str] = ()
) -> dict[str, Any]:
    """The vocabulary of a byte-level tokenizer.json as a converter writes it."""
    vocab = dict(tokenizer_json["model"]["vocab"])
    vocab |= {token["content"]: token["id"] for token in tokenizer_json["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    kinds = [CONTROL if t in special else USER_DEFINED if t in user_defined else NORMAL for t in tokens]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in tokenizer_json["model"]["merges"]],
    }
