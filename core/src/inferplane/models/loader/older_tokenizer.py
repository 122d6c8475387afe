"""Tokenizers in the forms that came before tokenizer.json, converted by transformers, which knows their rules."""

from __future__ import annotations

from pathlib import Path

from inferplane.models.errors import ModelLoadError
from inferplane.models.json_file import read_optional_json_table
from inferplane.tokenizer.from_folder import ROLES, ConvertedTokenizer

OLDER_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "tekken.json", "tiktoken.model", "vocab.txt")


def convert_older_tokenizer(folder: Path) -> ConvertedTokenizer:
    """Raises `ModelLoadError` that says which files would do. No code of the folder runs."""
    older = [name for name in OLDER_FILES if (folder / name).is_file()]
    if not older:
        raise ModelLoadError(f"{folder}: has no tokenizer.json (and none of {', '.join(OLDER_FILES)})")
    if "auto_map" in read_optional_json_table(folder / "tokenizer_config.json"):
        raise ModelLoadError(
            f"{folder}: its tokenizer is code of the repository (auto_map in tokenizer_config.json), which never "
            "runs here; add a tokenizer.json instead"
        )
    try:
        from transformers import AutoTokenizer

        found = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        implied = {role: text for role, text in found.special_tokens_map.items() if role in ROLES}
        return found.backend_tokenizer, implied
    # each family's converter fails in its own way, for one when its library is not installed
    except Exception as error:
        raise ModelLoadError(
            f"{folder}: has {older[0]} but no tokenizer.json, and converting it failed ({error}); "
            "install sentencepiece, protobuf and tiktoken, or add the model's tokenizer.json"
        ) from error
