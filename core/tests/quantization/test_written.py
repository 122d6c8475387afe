"""Matrices of checkpoints that other tools wrote, bit for bit as the tools' own dequantizers have them.

`tests/support/written_by_tools.py` made the files of the folder ``written``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import written_by_tools
from inferplane.api.quant import QuantizedWeight, StoredMatrix
from inferplane.layers.layer import Layer, WeightSlot
from inferplane.layers.stored import KeptMatrix
from inferplane.models.errors import ModelLoadError
from inferplane.models.weights import load_weights
from inferplane.quantization.registry import make_format
from model_harness import make_context

FILES = sorted(written_by_tools.FOLDER.glob("*.safetensors"))
MODULES = {
    "autoawq": "awq",
    "compressed-tensors": "compressed_tensors",
    "gptqmodel": "gptqmodel",
    "amd-quark": "quark",
    "nvidia-modelopt": "modelopt",
}


class OneMatrix(Layer):
    """Takes its tensors as a model's layers do, which look at their shapes and types."""

    def __init__(self, matrix: StoredMatrix) -> None:
        self.kept = KeptMatrix(make_context({"architectures": ["X"], "vocab_size": 8}), matrix)

    def weight_slots(self) -> Sequence[WeightSlot]:
        return self.kept.slots()


def opened(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A file's configuration and tensors."""
    with safe_open(path, "pt") as file:
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
        return json.loads(file.metadata()["quantization_config"]), tensors


def read(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> QuantizedWeight:
    model = {"architectures": ["X"], "vocab_size": 8, "quantization_config": config}
    found = make_format(make_context(model).config, {})
    assert found is not None
    matrix = found.matrix(written_by_tools.MATRIX, *tensors["dequantized"].shape)
    assert matrix is not None
    tensors = {key: each for key, each in tensors.items() if key != "dequantized"}
    suffixes = {stored.suffix for stored in matrix.tensors()}
    assert all(found.may_drop(f"layer.{key}", each) for key, each in tensors.items() if key not in suffixes)
    layer = OneMatrix(matrix)
    load_weights(layer, [(f"{matrix.name}.{key}", each) for key, each in tensors.items() if key in suffixes])
    return layer.kept.read()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_numbers_bit_for_bit(path: Path) -> None:
    config, tensors = opened(path)
    want = tensors["dequantized"]
    assert torch.equal(read(config, tensors).dequantize(want.dtype), want)


@pytest.mark.parametrize("path", [path for path in FILES if "-mx" in path.name], ids=lambda path: path.stem)
def test_a_scale_that_is_no_number_is_refused(path: Path) -> None:
    """OCP MX 1.0 has a block of a scale of 255 be no numbers."""
    config, tensors = opened(path)
    tensors["weight_scale"].view(torch.uint8)[3, 1] = 255
    message = rf"{written_by_tools.MATRIX} \[32, 64\]: a scale in e8m0 is 255"
    with pytest.raises(ModelLoadError, match=message):
        read(config, tensors)


def test_every_tool_has_written() -> None:
    written = {tool for tool in MODULES for path in FILES if path.name.startswith(f"{tool}-")}
    assert written == set(MODULES) == set(written_by_tools.TOOLS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tool", MODULES)
def test_what_an_installed_tool_writes(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(MODULES[tool])
    # some leave logs where they run
    monkeypatch.chdir(tmp_path)
    written_by_tools.write(tool, tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert files
    for path in files:
        test_numbers_bit_for_bit(path)
