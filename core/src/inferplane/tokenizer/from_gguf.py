"""The tokenizer of a GGUF file, rebuilt from its metadata.

Two kinds are known: ``gpt2``, byte-level BPE with its merges in the file, and ``llama``, the BPE of SentencePiece,
where the merges follow from the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers.processors import TemplateProcessing

from inferplane.models.errors import ModelLoadError
from inferplane.tokenizer.gguf_pre_tokenizers import split_rule
from inferplane.tokenizer.gguf_vocabulary import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, GGUFVocabulary
from inferplane.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from inferplane.models.loader.gguf_reader import Metadata

Merges = list[tuple[str, str]]

_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_END_KEYS = ("eos", "eot", "eom")
_TEMPLATE = "tokenizer.chat_template"
_SPACE_MARK = "\u2581"


def tokenizer_from_gguf(metadata: Metadata, chat_template: str | None = None) -> Tokenizer:
    """``chat_template`` replaces the file's own. Raises `ModelLoadError` naming the key that is missing or wrong."""
    kind = metadata.text("tokenizer.ggml.model")
    if kind not in _KINDS:
        raise ModelLoadError(
            f"{metadata.path}: tokenizer.ggml.model is {kind!r}; known kinds of tokenizer: {', '.join(_KINDS)}"
        )
    vocabulary = GGUFVocabulary.read(metadata)
    backend, adds_bos = _KINDS[kind](vocabulary)
    special_tokens = {
        role: text for role, name in _ROLES.items() if (text := vocabulary.special_token(name)) is not None
    }
    _add_special_tokens(backend, vocabulary, special_tokens)
    _add_surroundings(backend, metadata, special_tokens, adds_bos)
    ends = [text for name in _END_KEYS if (text := vocabulary.special_token(name)) is not None]
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=[vocabulary.id_of_token[text] for text in ends],
        chat_templates={"default": chat_template} if chat_template else _templates(metadata),
    )


def _byte_level_bpe(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    metadata = vocabulary.metadata
    rule = split_rule(metadata.optional_text("tokenizer.ggml.pre"), metadata.path)
    merges = [_merge(text, metadata) for text in metadata.texts("tokenizer.ggml.merges")]
    backend = _backend(vocabulary, merges, ignore_merges=rule.ignores_merges)
    backend.pre_tokenizer = rule.pre_tokenizer()
    if rule.has_nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, rule.adds_bos


def _merge(text: str, metadata: Metadata) -> tuple[str, str]:
    left, space, right = text.partition(" ")
    if not (left and space and right) or " " in right:
        raise ModelLoadError(
            f"{metadata.path}: tokenizer.ggml.merges has {text!r}, which is no pair of tokens"
        )
    return left, right


def _sentencepiece_bpe(vocabulary: GGUFVocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    has_prefix = vocabulary.metadata.flag("tokenizer.ggml.add_space_prefix") is not False
    backend = _backend(
        vocabulary,
        _merges_by_score(vocabulary),
        byte_fallback=True,
        fuse_unk=True,
        unk_token=vocabulary.special_token("unknown"),
    )
    mark_spaces = normalizers.Replace(" ", _SPACE_MARK)
    prefix = [normalizers.Prepend(_SPACE_MARK)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, mark_spaces])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


def _merges_by_score(vocabulary: GGUFVocabulary) -> Merges:
    """SentencePiece joins, again and again, the neighbours whose joined piece has the highest score."""
    scores = vocabulary.scores()
    id_of_piece = {
        token: token_id
        for token_id, token in enumerate(vocabulary.tokens)
        if vocabulary.kinds[token_id] == NORMAL
    }
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in id_of_piece.items():
        score = scores[token_id]
        if math.isnan(score):
            raise ModelLoadError(
                f"{vocabulary.metadata.path}: tokenizer.ggml.scores has no number for token {token_id}"
            )
        for cut in range(1, len(piece)):
            left, right = id_of_piece.get(piece[:cut]), id_of_piece.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-score, left, right, piece[:cut], piece[cut:]))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _backend(vocabulary: GGUFVocabulary, merges: Merges, **options: object) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocabulary.id_of_token, merges, **options))
    except ModelLoadError:
        raise
    # the library raises bare exceptions, for one when a merge names a piece that is no token
    except Exception as error:
        raise ModelLoadError(
            f"{vocabulary.metadata.path}: its tokens and merges do not fit together ({error})"
        ) from error


def _add_special_tokens(
    backend: tokenizers.Tokenizer, vocabulary: GGUFVocabulary, special_tokens: dict[str, str]
) -> None:
    special = dict.fromkeys([*vocabulary.of_kind(CONTROL, UNKNOWN), *special_tokens.values()])
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special if text])
    plain = [text for text in vocabulary.of_kind(USER_DEFINED) if text and text not in special]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])


def _add_surroundings(
    backend: tokenizers.Tokenizer, metadata: Metadata, special_tokens: dict[str, str], adds_bos: bool
) -> None:
    flag = metadata.flag("tokenizer.ggml.add_bos_token")
    adds_bos = adds_bos if flag is None else flag
    adds_eos = metadata.flag("tokenizer.ggml.add_eos_token") or False
    _surround(
        backend,
        bos=special_tokens.get("bos_token") if adds_bos else None,
        eos=special_tokens.get("eos_token") if adds_eos else None,
    )


def _surround(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    """Makes ``encode`` put these tokens around a text."""
    used = [token for token in (bos, eos) if token is not None]
    template = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    pair = [*template, *[part.replace("$A", "$B") + ":1" for part in template]]
    ids = [(token, backend.token_to_id(token)) for token in used]
    backend.post_processor = TemplateProcessing(single=template, pair=pair, special_tokens=ids)


def _templates(metadata: Metadata) -> dict[str, str]:
    templates = {
        key.removeprefix(f"{_TEMPLATE}."): metadata.text(key)
        for key in metadata
        if key.startswith(f"{_TEMPLATE}.")
    }
    default = metadata.optional_text(_TEMPLATE)
    return templates if default is None else {**templates, "default": default}


_KINDS: dict[str, Callable[[GGUFVocabulary], tuple[tokenizers.Tokenizer, bool]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}
"""By ``tokenizer.ggml.model``; each returns whether a BOS is added where the file does not say."""
