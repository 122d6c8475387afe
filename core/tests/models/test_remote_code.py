"""Models that ship code: found wherever they say so, refused where they need it, and never run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from inferplane.models.errors import ModelLoadError
from inferplane.models.remote_code import refuse_unknown_code, remote_code_references

PLACES = {
    "config.json": {"auto_map": {"AutoConfig": "trap.Config"}},
    "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["trap.Tokenizer", None]}},
    "processor_config.json": {"auto_map": {"AutoProcessor": "trap.Processor"}},
    "preprocessor_config.json": {"auto_map": {"AutoImageProcessor": "trap.Processor"}},
}
NESTED = {"text_config": {"deep": {"auto_map": {"AutoModel": "trap.Model"}}}}


def known(name: str) -> bool:
    return name == "LlamaForCausalLM"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    marker = tmp_path / "marker"
    (tmp_path / "trap.py").write_text(f"open({str(marker)!r}, 'w').close()")
    return tmp_path


@pytest.mark.parametrize("name", PLACES)
def test_an_unknown_architecture_is_refused_with_the_place(folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps(PLACES[name]))
    with pytest.raises(ModelLoadError, match=rf"Odd .*{name}: auto_map.*never runs here"):
        refuse_unknown_code(folder, {"architectures": ["Odd"]}, known)
    refuse_unknown_code(folder, {"architectures": ["LlamaForCausalLM"]}, known)
    assert not (folder / "marker").exists()


def test_nested_configurations_are_searched(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(NESTED))
    assert remote_code_references(folder) == ("config.json: text_config: deep: auto_map",)
    with pytest.raises(ModelLoadError, match="text_config: deep: auto_map"):
        refuse_unknown_code(folder, {}, known)


def test_a_model_without_code_is_none_of_our_business(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Odd"]}')
    assert remote_code_references(folder) == ()
    refuse_unknown_code(folder, {"architectures": ["Odd"]}, known)
