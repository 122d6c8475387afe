"""The container: read as the `gguf` package reads it, and never anything but `ModelLoadError` for what is damaged."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gguf_files
from inferplane.models.errors import ModelLoadError
from inferplane.models.loader.gguf_reader import GGUFReader

METADATA = {
    "general.architecture": "llama",
    "a.text": "naïve 🙂",
    "a.flag": True,
    "a.count": 17,
    "a.number": 0.5,
    "a.texts": ["", "b", "ccc"],
    "a.numbers": [1.5, -2.0],
    "a.flags": [True, False],
}
TENSORS = {
    "vector": np.arange(5, dtype=np.float32),
    "matrix": np.arange(128, dtype=np.float32).reshape(2, 64),
}


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    return gguf_files.write_gguf(path, METADATA, TENSORS, gguf.GGMLQuantizationType.Q8_0)


def test_metadata_comes_back(small_file: Path) -> None:
    metadata = GGUFReader(small_file).metadata
    assert metadata.text("a.text") == "naïve 🙂"
    assert metadata.flag("a.flag") is True
    assert metadata.integer("a.count") == 17
    assert metadata.optional_number("a.number") == 0.5
    assert metadata.optional_number("a.count") == 17.0
    assert metadata.texts("a.texts") == ["", "b", "ccc"]
    assert metadata["a.numbers"].tolist() == [1.5, -2.0]
    assert metadata["a.flags"].tolist() == [True, False]
    assert metadata.optional_text("absent") is None and metadata.flag("absent") is None


def test_tensors_lie_where_the_gguf_package_finds_them(small_file: Path) -> None:
    reader = GGUFReader(small_file)
    theirs = gguf.GGUFReader(small_file).tensors
    assert list(reader.entries) == [tensor.name for tensor in theirs]
    for tensor in theirs:
        entry = reader.entries[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert reader.data(entry).tobytes() == tensor.data.tobytes()
    assert reader.data(reader.entries["matrix"]).shape == (2, 68)


def test_the_demo_model_reads_as_the_gguf_package_reads_it(smollm2_gguf: Path) -> None:
    reader = GGUFReader(smollm2_gguf)
    theirs = gguf.GGUFReader(smollm2_gguf)
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            ours = reader.metadata[name]
            assert (ours.tolist() if isinstance(ours, np.ndarray) else ours) == field.contents(), name
    ours_by_name = {e.name: (e.offset, e.num_bytes, e.block_format.type_id) for e in reader.entries.values()}
    assert ours_by_name == {t.name: (t.data_offset, t.n_bytes, t.tensor_type) for t in theirs.tensors}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.integer("a.text"), "a.text should be of type int, but is 'naïve 🙂'"),
        (lambda m: m.integer("a.flag"), "a.flag should be of type int, but is True"),
        (lambda m: m.text("a.count"), "a.count should be of type str, but is 17"),
        (lambda m: m.texts("a.numbers"), "a.numbers should be of type list"),
        (lambda m: m.flag("a.count"), "a.count should be of type bool"),
        (lambda m: m.text("absent"), "metadata key 'absent' is missing"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(small_file: Path, call, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        call(GGUFReader(small_file).metadata)


def header(num_tensors: int = 0, num_entries: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_entries)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def tensor(
    name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, num: int | None = None
) -> bytes:
    num_dims = len(dims) if num is None else num
    return (
        text(name)
        + struct.pack("<I", num_dims)
        + struct.pack(f"<{len(dims)}Q", *dims)
        + struct.pack("<IQ", kind, offset)
    )


HUGE = 2**64 - 1
HOSTILE = {
    "empty": (b"", "is empty"),
    "another format": (b"PK\x03\x04" + bytes(40), r"starts with b'PK\\x03\\x04' instead of b'GGUF'"),
    "cut in the magic": (b"GG", "magic: needs 4 bytes at 0"),
    "cut in the version": (b"GGUF\x03", "version: needs 4 bytes"),
    "version 1": (header(version=1), "of GGUF version 1; versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "too many tensors": (header(HUGE, 0), f"tensor count: {HUGE} cannot be true of a file of 24 bytes"),
    "too many entries": (header(0, 2**40), "metadata count: "),
    "key past the end": (header(0, 1) + struct.pack("<Q", HUGE) + bytes(40), "metadata key 0: needs"),
    "key that is no text": (
        header(0, 1) + struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40),
        "metadata key 0: text at 32 is no UTF-8",
    ),
    "unknown value type": (header(0, 1) + text("k") + struct.pack("<I", 77) + bytes(8), "k: value type 77"),
    "array of arrays": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(40), "value type 9"),
    "array past the end": (header(0, 1) + text("k") + struct.pack("<IIQ", 9, 4, HUGE), "k: needs"),
    "texts past the end": (
        header(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2**60),
        "cannot be true of a file",
    ),
    "one text past the end": (
        header(0, 1) + text("k") + struct.pack("<IIQ", 9, 8, 2) + struct.pack("<QQ", 0, HUGE),
        "k: string 1 at .* reaches past the end",
    ),
    "key twice": (
        header(0, 2) + 2 * (text("kk") + struct.pack("<IB", 0, 1)) + bytes(9),
        "kk: is there twice",
    ),
    "alignment 3": (
        header(0, 1) + text("general.alignment") + struct.pack("<II", 4, 3),
        "general.alignment: 3 is no power of two",
    ),
    "no dimensions": (header(1, 0) + tensor(dims=()) + bytes(300), "'t': has 0 dimensions"),
    "many dimensions": (header(1, 0) + tensor(dims=(1,) * 9) + bytes(300), "'t': has 9 dimensions"),
    "dimension 0": (header(1, 0) + tensor(dims=(32, 0)) + bytes(300), r"'t': has the shape \(0, 32\)"),
    "more data than the file": (
        header(1, 0) + tensor(dims=(32, 2**62)) + bytes(300),
        r"tensor 't' of shape \[4611686018427387904, 32\] ends at",
    ),
    "offset past the end": (header(1, 0) + tensor(offset=2**40) + bytes(300), "cut short"),
    "crooked offset": (header(1, 0) + tensor(offset=8) + bytes(300), "no multiple of the alignment 32"),
    "unknown tensor type": (header(1, 0) + tensor(kind=41) + bytes(300), "'t' is of type Q1_0"),
    "a broken row of blocks": (
        header(1, 0) + tensor(dims=(33,), kind=8) + bytes(300),
        "no whole number of Q8_0 blocks",
    ),
    "tensor twice": (header(2, 0) + 2 * tensor() + bytes(400), "'t': is there twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_header_is_refused_with_the_file_and_the_field(tmp_path: Path, case: str) -> None:
    content, message = HOSTILE[case]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as caught:
        GGUFReader(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: cannot be opened: No such file"):
        GGUFReader(tmp_path / "absent.gguf")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_shortened_file_is_refused(small_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = small_file.read_bytes()
    reader = GGUFReader(small_file)
    end = max(entry.offset + entry.num_bytes for entry in reader.entries.values())
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, end - 1))])
    with pytest.raises(ModelLoadError):
        GGUFReader(path)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_give_an_error_or_a_readable_file(
    small_file: Path, tmp_path: Path, changes: list[tuple[int, int]]
) -> None:
    content = bytearray(small_file.read_bytes())
    for place, value in changes:
        content[place % len(content)] = value
    path = tmp_path / "changed.gguf"
    path.write_bytes(content)
    try:
        reader = GGUFReader(path)
    except ModelLoadError:
        return
    for entry in reader.entries.values():
        assert reader.data(entry).nbytes == entry.num_bytes
