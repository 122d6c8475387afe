"""`Tokenizer`: one model's text, ids, special tokens and chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, overload

import tokenizers

from inferplane.tokenizer.chat_template import ChatTemplate, ChatTemplateError, Messages
from inferplane.tokenizer.token_bytes import TokenToBytes, token_to_bytes

Tools = Sequence[Mapping[str, Any]]


class Tokenizer:
    """Immutable once made, and safe to use from many threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        eos_token_ids: Iterable[int] = (),
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """``special_tokens`` maps roles to their texts, such as ``{"bos_token": "<s>"}``; ``eos_token_ids`` are
        further ids that end an answer besides that of ``eos_token``."""
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.special_tokens = dict(special_tokens)
        self.bos_token_id = self._id_of_role("bos_token")
        self.eos_token_id = self._id_of_role("eos_token")
        """The tokenizer's own end token; any of `eos_token_ids` ends an answer."""
        own_eos = () if self.eos_token_id is None else (self.eos_token_id,)
        self.eos_token_ids = frozenset((*own_eos, *eos_token_ids))
        self._chat_template = ChatTemplate(chat_templates, special_tokens) if chat_templates else None

    def _id_of_role(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self.backend.token_to_id(text)

    @cached_property
    def vocab_size(self) -> int:
        """Ids are less than this. A model may have more rows, which no text gives."""
        added = max(self.backend.get_added_tokens_decoder(), default=-1) + 1
        return max(added, self.backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` skips."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens in the text become their ids; ``add_special_tokens`` puts the model's own around it."""
        return self.backend.encode(_whole_characters(text), add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode` for each text, in parallel on the cores of the host."""
        whole = [_whole_characters(text) for text in texts]
        found = self.backend.encode_batch_fast(whole, add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in found]

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Ids of two texts in one prompt, as the model separates them, and where those of the second begin: at the end
        where the tokenizer does not tell the two apart."""
        encoding = self.backend.encode(_whole_characters(first), _whole_characters(second))
        types = encoding.type_ids
        return encoding.ids, types.index(1) if 1 in types else len(types)

    def min_num_tokens(self, text: str) -> int:
        """A number that `encode` gives no fewer tokens than, found without the seconds and the memory that encoding a
        text of megabytes takes; 0 where the tokenizer may drop or join any amount of text."""
        return -(-len(text) // self._most_chars_of_token) if self._most_chars_of_token else 0

    @cached_property
    def _most_chars_of_token(self) -> int | None:
        """The most characters of a text that one token can stand for; None where there is no such bound."""
        backend = self.backend
        model, normalizer = backend.model, backend.normalizer
        keeps_unknown = isinstance(model, tokenizers.models.BPE) and (
            model.unk_token is None or model.byte_fallback
        )
        added = backend.get_added_tokens_decoder().values()
        swallows_spaces = any(token.lstrip or token.rstrip for token in added)
        if (
            not keeps_unknown
            or swallows_spaces
            or not isinstance(normalizer, tokenizers.normalizers.NFC | None)
        ):
            return None
        # however a vocabulary spells its tokens, none is spelt shorter than the text that it stands for
        num_chars = max(map(len, backend.get_vocab()), default=0)
        # NFC makes one character of a letter and its accents: of four at the most
        return (num_chars if normalizer is None else num_chars * 4) or None

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are no UTF-8 become U+FFFD. Ids outside the vocabulary give no text."""
        known = [token_id for token_id in token_ids if 0 <= token_id < self.vocab_size]
        return self.backend.decode(known, skip_special_tokens=skip_special_tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it; None for an id that it does not have."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; empty for an id that the vocabulary does not have."""
        token = self.id_to_token(token_id)
        return b"" if token is None else self._token_to_bytes(token)

    @cached_property
    def _token_to_bytes(self) -> TokenToBytes:
        return token_to_bytes(self.backend)

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template; None if the model has none."""
        return None if self._chat_template is None else self._chat_template.source

    @overload
    def apply_chat_template(
        self, /, messages: Messages, tools: Tools | None = ..., add_generation_prompt: bool = ..., *,
        tokenize: Literal[False] = ..., continue_final_message: bool = ..., **kwargs: Any,
    ) -> str: ...  # fmt: skip

    @overload
    def apply_chat_template(
        self, /, messages: Messages, tools: Tools | None = ..., add_generation_prompt: bool = ..., *,
        tokenize: Literal[True], continue_final_message: bool = ..., **kwargs: Any,
    ) -> list[int]: ...  # fmt: skip

    def apply_chat_template(
        self,
        /,
        messages: Messages,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        *,
        tokenize: bool = False,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str | list[int]:
        """The prompt text of a conversation, or its ids.

        A template writes every special token itself, so ids come without those that `encode` would add: one BOS, not
        two. ``kwargs`` are variables of the template. Raises `ChatTemplateError`.
        """
        if self._chat_template is None:
            raise ChatTemplateError(
                "the model has no chat template; give one with --chat-template (a file or the text)"
            )
        if "chat_template" in kwargs:
            raise ChatTemplateError("chat_template is chosen when the model is loaded, not per call")
        text = self._chat_template.render(
            messages,
            tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **kwargs,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text


def _whole_characters(text: str) -> str:
    """JSON can spell halves of characters, which are no Unicode: pairs are joined, and single ones become U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
