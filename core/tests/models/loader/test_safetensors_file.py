"""One safetensors file: read as the safetensors library reads it, and refused by name when it is damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.safetensors_file import SafetensorsFile

DTYPES = [
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "int64",
    "int32",
    "int16",
    "int8",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.safetensors"
    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(5, dtype=torch.bfloat16),
        "c": torch.tensor(3),
    }
    save_file(tensors, path, metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path: Path, name: str) -> None:
    values = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name))
    empty = torch.empty((0, 4), dtype=values.dtype)
    scalar = torch.ones((), dtype=values.dtype)
    save_file({"t": values, "empty": empty, "scalar": scalar}, tmp_path / "t.safetensors")
    file = SafetensorsFile(tmp_path / "t.safetensors")
    expected = load_file(tmp_path / "t.safetensors")
    for key in expected:
        got = file.tensor(key)
        assert got.dtype == expected[key].dtype and got.shape == expected[key].shape
        assert torch.equal(got.flatten().view(torch.uint8), expected[key].flatten().view(torch.uint8))
    assert file.tensor("t").tolist() == values.tolist()


def test_a_tensor_is_a_view_that_does_not_write_to_the_file(small_file: Path) -> None:
    before = small_file.read_bytes()
    file = SafetensorsFile(small_file)
    file.tensor("a").fill_(9)
    assert file.tensor("a")[0, 0] == 9
    assert small_file.read_bytes() == before


def test_a_tensor_at_an_odd_place_is_read_too(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)},
        b"\x07" + struct.pack("<2f", 1.5, 2),
    )
    assert SafetensorsFile(path).tensor("b").tolist() == [1.5, 2.0]


def entry(dtype: Any, shape: Any, begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write(folder: Path, header: object, data: bytes) -> Path:
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = folder / "made.safetensors"
    path.write_bytes(struct.pack("<Q", len(content)) + content + data)
    return path


TWICE = b'{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}, "a": {}}'


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", b"", "header cannot be read"),
        (b"[" * 100_000, b"", "header cannot be read"),
        (b"[]", b"", "no table of tensors"),
        (b'{"\xff": 1}', b"", "header cannot be read"),
        (TWICE, b"1", "'a' is there twice"),
        ({"a": 3}, b"", "tensor 'a' has no dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32"}}, b"", "tensor 'a' has no dtype, shape and data_offsets"),
        ({"a": entry("F12", [1], 0, 4)}, bytes(4), "tensor 'a' is of type 'F12'; known types: F64"),
        ({"a": entry(["F32"], [1], 0, 4)}, bytes(4), "tensor 'a' is of type"),
        ({"a": entry("F32", [-1], 0, 4)}, bytes(4), r"tensor 'a' has the shape \[-1\]"),
        ({"a": entry("F32", [True], 0, 4)}, bytes(4), "tensor 'a' has the shape"),
        ({"a": entry("F32", [1.0], 0, 4)}, bytes(4), "tensor 'a' has the shape"),
        ({"a": entry("F32", [1], 4, 0)}, bytes(4), "needs 4 bytes, but has -4"),
        ({"a": entry("F32", [2**62, 2**62], 0, 4)}, bytes(4), "tensor 'a' of F32"),
        ({"a": entry("F32", [2], 0, 8)}, bytes(4), "tensor 'a' ends at byte"),
        ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3), "tensor 'b' begins at byte"),
        ({"a": entry("U8", [2], 1, 3)}, bytes(3), "tensor 'a' begins at byte"),
        ({"a": entry("U8", [2], 0, 2)}, bytes(3), "its tensors end at byte"),
    ],
)
def test_a_damaged_header_is_refused_with_the_file_and_the_tensor(
    tmp_path: Path, header: object, data: bytes, message: str
) -> None:
    path = write(tmp_path, header, data)
    with pytest.raises(ModelLoadError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**63), struct.pack("<Q", 50) + b"{}"])
def test_a_stump_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "stump.safetensors"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"stump\.safetensors.*fetch it again"):
        SafetensorsFile(path)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True))
def test_every_shortened_file_is_refused(small_file: Path, share: float) -> None:
    whole = small_file.read_bytes()
    cut = small_file.with_name("cut.safetensors")
    cut.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelLoadError, match=r"cut\.safetensors"):
        SafetensorsFile(cut)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_give_an_error_or_a_readable_file(
    small_file: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(small_file.read_bytes())
    for place, value in changes:
        content[place % len(content)] = value
    path = small_file.with_name("changed.safetensors")
    path.write_bytes(content)
    try:
        file = SafetensorsFile(path)
    except ModelLoadError:
        return
    for name, place in file.places.items():
        assert tuple(file.tensor(name).shape) == place.shape
