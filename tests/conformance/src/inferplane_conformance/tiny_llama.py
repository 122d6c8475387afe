"""A random Llama of two layers with a tokenizer of bytes, made where it is needed: no weights travel with the kit."""

from __future__ import annotations

from pathlib import Path

NUM_SPECIAL = 3
VOCAB_SIZE = 256 + NUM_SPECIAL
END, TURN_START, TURN_END = "<|end|>", "<|turn|>", "<|turn_end|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|turn|>' + message['role'] + ' ' + message['content'] + '<|turn_end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>assistant ' }}{% endif %}"
)


def write_tiny_llama(folder: Path, seed: int = 0) -> Path:
    """Writes the model and returns ``folder``. Weights are wide, so that the greedy token is never a near tie."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.2
            parameter.copy_(1 + noise if "norm" in name else noise)
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [END, TURN_START, TURN_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
