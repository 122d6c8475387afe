"""The tokenizer of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from inferplane.models.errors import ModelLoadError
from inferplane.models.json_file import read_optional_json_table
from inferplane.tokenizer.template_files import templates_of_folder
from inferplane.tokenizer.tokenizer import Tokenizer

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

ConvertedTokenizer = tuple[tokenizers.Tokenizer, Mapping[str, str]]
"""A tokenizer of an older form in the present one, with the special tokens by role that its class implies."""


def tokenizer_from_folder(
    path: Path, chat_template: str | None = None, *, converted: ConvertedTokenizer | None = None
) -> Tokenizer:
    """``chat_template`` replaces the folder's own; ``converted`` stands for a tokenizer.json that is not there.

    What is put around a text is what tokenizer.json says; ``add_bos_token`` and the like in the configuration are
    leftovers of older forms, which transformers disregards too. Raises `ModelLoadError` naming the file at fault.
    """
    config = read_optional_json_table(path / "tokenizer_config.json")
    special_map = read_optional_json_table(path / "special_tokens_map.json")
    written = {role: _content(config.get(role, special_map.get(role))) for role in ROLES}
    backend, implied = (_backend(path / "tokenizer.json"), {}) if converted is None else converted
    special_tokens = {**implied, **{role: text for role, text in written.items() if text is not None}}
    special = [*special_tokens.values(), *_extra_special_tokens(config, special_map)]
    _add_missing_tokens(backend, config, special)
    templates = {"default": chat_template} if chat_template else templates_of_folder(path)
    return Tokenizer(
        backend,
        special_tokens=special_tokens,
        eos_token_ids=eos_token_ids_of_folder(path),
        chat_templates=templates,
    )


def _backend(file: Path) -> tokenizers.Tokenizer:
    if not file.is_file():
        raise ModelLoadError(f"{file}: there is no such file")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    # the library raises bare exceptions
    except Exception as error:
        raise ModelLoadError(f"{file}: is no tokenizer that can be read ({error})") from error


def _content(token: Any) -> str | None:
    """Special tokens are written as a text or as an object."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _extra_special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> Iterable[str]:
    for table in (config, special_map):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            tokens = table.get(key) or []
            values = tokens.values() if isinstance(tokens, Mapping) else tokens
            yield from (text for value in values if (text := _content(value)) is not None)


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special: Iterable[str]
) -> None:
    """tokenizer_config.json may name tokens that tokenizer.json lacks, or holds as ordinary ones."""
    present = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    missing = []
    for _, fields in sorted(_declared_tokens(config).items()):
        if fields["content"] not in present:
            missing.append(_added_token(fields))
    backend.add_tokens(missing)
    named = {token.content: token for token in missing}
    for text in dict.fromkeys(special):
        token = present.get(text) or named.get(text)
        if token is None or not token.special:
            backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])


def _declared_tokens(config: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    declared = config.get("added_tokens_decoder") or {}
    try:
        found = {int(token_id): fields for token_id, fields in declared.items()}
        if all(isinstance(fields["content"], str) for fields in found.values()):
            return found
    except (AttributeError, TypeError, KeyError, ValueError):
        pass
    raise ModelLoadError(
        "tokenizer_config.json: added_tokens_decoder should map ids to objects with a content"
    )


def _added_token(fields: Mapping[str, Any]) -> tokenizers.AddedToken:
    flags = ("special", "normalized", "lstrip", "rstrip", "single_word")
    return tokenizers.AddedToken(
        fields["content"], **{flag: bool(fields[flag]) for flag in flags if flag in fields}
    )


def eos_token_ids_of_folder(path: Path) -> tuple[int, ...]:
    """Of the generation settings; where they name none, of the model's configuration."""
    for name in ("generation_config.json", "config.json"):
        value = read_optional_json_table(path / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(token_id, int) for token_id in ids):
            raise ModelLoadError(
                f"{path / name}: eos_token_id should be an id or a list of ids, but is {value!r}"
            )
        if ids:
            return tuple(ids)
    return ()
