"""Folders with one file, with shards and an index, and everything that can be missing from them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.safetensors_folder import SafetensorsFolder

FIRST = {"model.a": torch.arange(4.0), "model.b": torch.ones(2, 2)}
SECOND = {"model.c": torch.zeros(3, dtype=torch.bfloat16)}
INDEX = "model.safetensors.index.json"
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    save_file(FIRST, tmp_path / ONE)
    save_file(SECOND, tmp_path / TWO)
    write_index(tmp_path, {**dict.fromkeys(FIRST, ONE), **dict.fromkeys(SECOND, TWO)})
    return tmp_path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))


def assert_holds_everything(folder: Path) -> None:
    checkpoint = SafetensorsFolder(folder)
    got = dict(checkpoint.tensors())
    assert sorted(got) == sorted(checkpoint.tensor_names()) == ["model.a", "model.b", "model.c"]
    for name, values in {**FIRST, **SECOND}.items():
        assert got[name].dtype == values.dtype and torch.equal(got[name], values)


def test_shards(sharded: Path) -> None:
    assert_holds_everything(sharded)
    assert SafetensorsFolder(sharded).hf_config["model_type"] == "llama"


def test_shards_without_an_index(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert_holds_everything(sharded)


def test_one_file_goes_before_other_safetensors_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({**FIRST, **SECOND}, tmp_path / "model.safetensors")
    save_file({"model.a": torch.zeros(9)}, tmp_path / "consolidated.safetensors")
    assert_holds_everything(tmp_path)


def test_the_bar_counts_bytes(sharded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    list(SafetensorsFolder(sharded).tensors(progress=True))
    captured = capsys.readouterr()
    assert "Loading weights: 100%" in captured.err and "38.0/38.0" in captured.err
    assert captured.out == ""


def test_generation_config_and_template(sharded: Path) -> None:
    assert SafetensorsFolder(sharded).generation_config == {}
    assert SafetensorsFolder(sharded).chat_template is None
    (sharded / "generation_config.json").write_text('{"temperature": 0.5}')
    (sharded / "chat_template.jinja").write_text("{{ messages }}")
    assert SafetensorsFolder(sharded).generation_config == {"temperature": 0.5}
    assert SafetensorsFolder(sharded).chat_template == "{{ messages }}"


def drop_shard(folder: Path) -> None:
    (folder / TWO).unlink()


def cut_shard(folder: Path) -> None:
    (folder / TWO).write_bytes((folder / TWO).read_bytes()[:-1])


def forget_tensor(folder: Path) -> None:
    write_index(folder, {"model.a": ONE, "model.c": TWO})


def invent_tensor(folder: Path) -> None:
    write_index(folder, {**dict.fromkeys(FIRST, ONE), "model.c": TWO, "model.d": TWO})


def misplace_tensor(folder: Path) -> None:
    write_index(folder, {**dict.fromkeys(FIRST, ONE), "model.c": ONE})


def lead_out(folder: Path) -> None:
    write_index(folder, {"model.a": "../other.safetensors"})


def no_map(folder: Path) -> None:
    write_index(folder, ["model.a"])


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def list_config(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")


def two_with_one_name(folder: Path) -> None:
    (folder / INDEX).unlink()
    save_file(FIRST, folder / TWO)


def nothing(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_shard, rf"{TWO}: is missing, but {INDEX} names it"),
        (cut_shard, rf"{TWO}: tensor 'model.c' ends at byte"),
        (forget_tensor, rf"{ONE}: holds tensor 'model.b', which {INDEX} does not place there"),
        (invent_tensor, rf"{INDEX}: places tensor 'model.d' in {TWO}, which does not hold it"),
        (misplace_tensor, rf"{INDEX}: places tensor 'model.c' in {ONE}, which does not hold it"),
        (lead_out, rf"{INDEX}: weight_map should name a file of this folder"),
        (no_map, rf"{INDEX}: weight_map should name a file of this folder"),
        (broken_index, rf"{INDEX}: is no valid JSON"),
        (no_config, "config.json: cannot be read: No such file"),
        (list_config, "config.json: should hold a JSON object, but holds list"),
        (two_with_one_name, rf"both {ONE} and {TWO} hold tensor 'model.a', and no {INDEX}"),
        (nothing, "has no model.safetensors"),
    ],
)
def test_what_is_missing_or_damaged_is_named(sharded: Path, damage, message: str) -> None:
    damage(sharded)
    with pytest.raises(ModelLoadError, match=message):
        SafetensorsFolder(sharded)


class Trap:
    """A pickle that leaves a mark when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "weights.pth", "consolidated.00.pth", "model.ckpt"]
)
def test_pickles_are_refused_and_never_loaded(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / name).write_bytes(pickle.dumps(Trap(marker)))
    with pytest.raises(ModelLoadError, match=rf"pickles \({name}\), which can run code.*safetensors"):
        SafetensorsFolder(folder)
    # nor when it calls itself safetensors
    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap(marker)))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        SafetensorsFolder(folder)
    assert not marker.exists()
