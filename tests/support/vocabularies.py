"""Small tokenizers of each kind that models use, built in memory."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from inferplane.tokenizer import Tokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "Zürich, naïve café — “quoted” … 你好，世界！ こんにちは世界 안녕하세요",
    "emoji: 🙂 👩‍👩‍👧 🇨🇭 ❤️ and tabs\t\tand\n\nnewlines   and spaces",
]


def byte_level() -> Tokenizer:
    """Byte-level BPE, as of GPT-2: any character may be cut between tokens."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    backend.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    return Tokenizer(backend, special_tokens={"eos_token": "<|end|>"})


def sentencepiece(*, drops_first_space: bool = True) -> Tokenizer:
    """BPE with byte fallback and marked spaces, as of Llama 2 (drops the first space) and Gemma (keeps it)."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁the", "▁dog", "the", "dog", ".", "▁▁", "é", "世", "\n"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if drops_first_space else steps)
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens([AddedToken("▁▁▁▁", special=False, normalized=False)])
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def wordpiece() -> Tokenizer:
    """A decoder that does more than join: it puts spaces between words."""
    pieces = ["[UNK]", "[CLS]", "the", "dog", "##s", "cat", "##ter", "世", "é"]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens(["[CLS]"])
    return Tokenizer(backend, special_tokens={"eos_token": "[CLS]"})
