"""Where chat templates come from: the files of a model folder, or the operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inferplane.models.errors import ModelLoadError
from inferplane.models.json_file import read_optional_json_table


def templates_of_folder(path: Path) -> dict[str, str]:
    """Sources by name; the main one is ``default``. A file of its own goes before an entry in a configuration."""
    tokenizer_config = read_optional_json_table(path / "tokenizer_config.json")
    templates = _named(read_optional_json_table(path / "chat_template.json").get("chat_template"), path)
    templates |= _named(tokenizer_config.get("chat_template"), path)
    for file in sorted((path / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = _read(file)
    if (path / "chat_template.jinja").is_file():
        templates["default"] = _read(path / "chat_template.jinja")
    return templates


def default_template_of_folder(path: Path) -> str | None:
    templates = templates_of_folder(path)
    return templates.get("default") or next(iter(templates.values()), None)


def operator_template(text_or_path: str) -> str:
    """What ``--chat-template`` means: a file, or the template itself. Raises `ModelLoadError` for neither."""
    if "{" in text_or_path or "\n" in text_or_path:
        return text_or_path
    path = Path(text_or_path).expanduser()
    if path.is_file():
        return _read(path)
    raise ModelLoadError(
        f"chat template {text_or_path!r} is no file, and no template either, for it has no {{{{ or {{%"
    )


def _named(value: Any, path: Path) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    try:
        found = {entry["name"]: entry["template"] for entry in value}
    except (TypeError, KeyError):
        found = {None: None}
    if not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ModelLoadError(
            f"{path}: chat_template should be a text or a list of objects with name and template"
        )
    return found


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{file}: cannot be read: {error}") from error
