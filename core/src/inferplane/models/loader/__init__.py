"""Stored models: one protocol, `Checkpoint`, over safetensors folders and GGUF files.

Nothing here imports torch before the first tensor is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.checkpoint import Checkpoint

if TYPE_CHECKING:
    from inferplane.models.source import ModelSource
    from inferplane.tokenizer import Tokenizer

__all__ = [
    "LOAD_FORMATS",
    "Checkpoint",
    "has_tokenizer",
    "ids_only_tokenizer",
    "load_generation_config",
    "load_tokenizer",
    "open_checkpoint",
]

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
"""What `open_checkpoint` takes; plugins bring others."""


def open_checkpoint(source: ModelSource, load_format: str = "auto") -> Checkpoint:
    """Reads headers and configuration. Raises `ModelLoadError` naming the file and the field or tensor at fault, or
    the format that was asked for and is not there."""
    stored = "gguf" if source.kind == "gguf" else "safetensors"
    if load_format not in ("auto", "dummy", stored):
        raise ModelLoadError(
            f"{source.path}: is a {stored} model, but load_format is {load_format}: leave it out, or name another model"
        )
    if load_format == "dummy" and source.kind == "folder":
        from inferplane.models.loader.config_folder import ConfigFolder

        return ConfigFolder(source.path)
    if source.kind == "gguf":
        from inferplane.models.loader.gguf import GGUFFile

        return GGUFFile(source.path)
    from inferplane.models.loader.safetensors_folder import SafetensorsFolder

    return SafetensorsFolder(source.path)


def load_tokenizer(source: ModelSource, chat_template: str | None = None) -> Tokenizer:
    """``chat_template`` is what ``--chat-template`` was given: a file or the template itself."""
    from inferplane.tokenizer.template_files import operator_template

    template = None if chat_template is None else operator_template(chat_template)
    if source.kind == "gguf":
        from inferplane.models.loader.gguf_reader import GGUFReader
        from inferplane.tokenizer.from_gguf import tokenizer_from_gguf

        return tokenizer_from_gguf(GGUFReader(source.path).metadata, template)
    from inferplane.tokenizer.from_folder import tokenizer_from_folder

    if (source.path / "tokenizer.json").is_file():
        return tokenizer_from_folder(source.path, template)
    from inferplane.models.loader.older_tokenizer import convert_older_tokenizer

    return tokenizer_from_folder(source.path, template, converted=convert_older_tokenizer(source.path))


def ids_only_tokenizer(source: ModelSource) -> Tokenizer:
    """Stands in for the tokenizer; knows the ids that end an answer as far as the model's configuration tells them."""
    from inferplane.tokenizer.from_folder import eos_token_ids_of_folder
    from inferplane.tokenizer.ids_only import IdsOnlyTokenizer

    if source.kind == "gguf":
        return IdsOnlyTokenizer(load_tokenizer(source).eos_token_ids)
    return IdsOnlyTokenizer(eos_token_ids_of_folder(source.path))


def has_tokenizer(source: ModelSource) -> bool:
    from inferplane.models.loader.older_tokenizer import OLDER_FILES

    names = ("tokenizer.json", *OLDER_FILES)
    return source.kind == "gguf" or any((source.path / name).is_file() for name in names)


def load_generation_config(source: ModelSource) -> dict[str, Any]:
    """Sampling defaults that the model's makers recommend, and its special ids; empty where there are none."""
    if source.kind == "gguf":
        from inferplane.models.loader.gguf_config import generation_config
        from inferplane.models.loader.gguf_reader import GGUFReader

        return generation_config(GGUFReader(source.path).metadata)
    from inferplane.models.json_file import read_optional_json_table

    return read_optional_json_table(source.path / "generation_config.json")
