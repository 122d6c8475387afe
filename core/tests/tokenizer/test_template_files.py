"""Every place that a template may stand in is found, the operator's first."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import tiny_models
from inferplane.models.errors import ModelLoadError
from inferplane.models.loader import load_tokenizer
from inferplane.tokenizer.template_files import (
    default_template_of_folder,
    operator_template,
    templates_of_folder,
)


def in_config(folder: Path, template: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))


def in_own_file(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)


def in_json_file(folder: Path, template: str) -> None:
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))


@pytest.mark.parametrize("place", [in_config, in_own_file, in_json_file])
def test_each_place_is_found(tmp_path: Path, place) -> None:
    place(tmp_path, "{{ messages }} é")
    assert templates_of_folder(tmp_path) == {"default": "{{ messages }} é"}
    assert default_template_of_folder(tmp_path) == "{{ messages }} é"


def test_a_file_of_its_own_goes_first(tmp_path: Path) -> None:
    in_json_file(tmp_path, "json")
    assert default_template_of_folder(tmp_path) == "json"
    in_config(tmp_path, "config")
    assert default_template_of_folder(tmp_path) == "config"
    in_own_file(tmp_path, "own")
    assert default_template_of_folder(tmp_path) == "own"


def test_named_templates(tmp_path: Path) -> None:
    in_config(tmp_path, [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}])
    assert templates_of_folder(tmp_path) == {"default": "d", "tool_use": "t"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    in_own_file(tmp_path, "own")
    assert templates_of_folder(tmp_path) == {"default": "own", "tool_use": "t", "rag": "r"}


def test_no_template(tmp_path: Path) -> None:
    assert templates_of_folder(tmp_path) == {}
    assert default_template_of_folder(tmp_path) is None


@pytest.mark.parametrize("template", [3, [{"name": "default"}], [3], [{"name": 1, "template": "x"}]])
def test_what_is_no_template_is_refused(tmp_path: Path, template: object) -> None:
    in_config(tmp_path, template)
    with pytest.raises(ModelLoadError, match="chat_template should be a text or a list"):
        templates_of_folder(tmp_path)


def test_the_operator_gives_a_file_or_a_text(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ 1 }}")
    assert operator_template(str(tmp_path / "mine.jinja")) == "{{ 1 }}"
    assert operator_template("{{ 2 }}") == "{{ 2 }}"
    with pytest.raises(
        ModelLoadError, match=r"chat template 'absent.jinja' is no file, and no template either"
    ):
        operator_template("absent.jinja")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelLoadError, match=r"bytes.jinja: cannot be read"):
        operator_template(str(tmp_path / "bytes.jinja"))


def test_the_operator_goes_before_the_model(tmp_path: Path, smollm2_gguf: Path) -> None:
    tiny_models.write_tokenizer(tmp_path)
    for source in (
        SimpleNamespace(kind="folder", path=tmp_path),
        SimpleNamespace(kind="gguf", path=smollm2_gguf),
    ):
        ours = load_tokenizer(source, "{{ 'mine' }}")
        assert ours.apply_chat_template([{"role": "user", "content": "x"}]) == "mine"
        assert load_tokenizer(source).chat_template != "{{ 'mine' }}"
