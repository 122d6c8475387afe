"""Random two-layer models with a real tokenizer, written by transformers: an oracle for every architecture.

    folder = make_tiny_model("qwen3", tmp_path, num_key_value_heads=1)

Weights are wide (standard deviation 0.2), so that the greedy token is never a near tie, and biases and norm weights are
random too, so that a forgotten one shows.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from families import FAMILIES, OTHER_FAMILIES

VOCAB_SIZE = 1024
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Bytes of several scripts, so that merges cross more than ASCII.
_OTHER_SCRIPTS = [
    "Füße, naïveté, Ελληνικά, русский язык, 日本語のテキスト, 中文文本, 한국어, العربية, 🙂🚀🌍"
] * 3

# arch -> (transformers configuration class, what differs from _SHARED)
_ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2Config", {"use_sliding_window": False}),
    "qwen3": ("Qwen3Config", {"use_sliding_window": False, "head_dim": 32}),
}
ARCHITECTURES = tuple(_ARCHITECTURES)

_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make_tiny_model(
    arch: str, directory: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Writes a random model of `arch` below `directory` and returns its folder.

    `arch` is one of ARCHITECTURES, of `families.FAMILIES` or of `families.OTHER_FAMILIES`.

    `overrides` are fields of the transformers configuration. The same arguments give the same weights.
    """
    known = {**FAMILIES, **OTHER_FAMILIES, **_ARCHITECTURES}
    if arch not in known:
        raise ValueError(f"arch must be one of {', '.join(known)}, got {arch!r}")
    import torch
    import transformers

    config_class, differences = known[arch]
    config = getattr(transformers, config_class)(**{**_SHARED, **differences, **overrides})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomize(model, seed)
    folder = directory / f"tiny-{arch}-{seed}"
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes the tokenizer of VOCAB_SIZE tokens with its chat template into `folder`."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(_trained_tokenizer()),
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)


@cache
def _trained_tokenizer() -> str:
    """A byte-level BPE trained on the text of the license, a file that does not change."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    license_text = Path(__file__).parents[2].joinpath("LICENSE").read_text(encoding="utf-8")
    tokenizer.train_from_iterator([*license_text.splitlines(), *_OTHER_SCRIPTS], trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens instead of {VOCAB_SIZE}")
    return tokenizer.to_str()


def randomize(model: Any, seed: int) -> None:
    """Draws every parameter anew."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # A tied output head is the embedding itself, and parameters() yields it once.
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if "norm" in name else noise)
