"""`IdsOnlyTokenizer`: stands in where no tokenizer is wanted, or a folder for dummy weights has none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Never

import tokenizers

from inferplane.request import ParameterError
from inferplane.tokenizer.tokenizer import Tokenizer


class IdsOnlyTokenizer(Tokenizer):
    """Gives no text for any id, and refuses texts with `ParameterError`."""

    def __init__(self, eos_token_ids: Iterable[int]) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.decoder = tokenizers.decoders.ByteLevel()  # ids that no vocabulary has are cheap to decode so
        super().__init__(backend, special_tokens={}, eos_token_ids=eos_token_ids)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        _refuse()

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        _refuse()

    def min_num_tokens(self, text: str) -> int:
        _refuse()


def _refuse() -> Never:
    raise ParameterError(
        "prompt",
        "the engine runs without a tokenizer: give prompts as token ids, or start it without skip_tokenizer_init on a "
        "folder that has a tokenizer",
    )
