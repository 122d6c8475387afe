"""Reads the container that GGUF files are: typed metadata, a table of tensors, and their bytes.

A file is untrusted: every count, length and offset is checked against the size of the file before it is used,
and whatever is wrong becomes a `ModelLoadError` that names the file and the field.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never, TypeVar

import numpy as np

from inferplane.models.errors import ModelLoadError
from inferplane.quantization.ggml import BlockFormat, Bytes, block_format

T = TypeVar("T")

_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# the shortest string is its length of 8 bytes; the others are at least as long as their fixed fields
_MIN_STRING_BYTES = 8
_MIN_ENTRY_BYTES = _MIN_STRING_BYTES + 4 + 1
_MIN_TENSOR_BYTES = _MIN_STRING_BYTES + 4 + 4 + 8

_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch counts them (the file has them the other way round)."""
    block_format: BlockFormat
    offset: int
    """Of the first byte, from the start of the file."""
    num_bytes: int


class Metadata(Mapping[str, Any]):
    """The metadata of a file: strings, numbers, booleans, lists of strings, and numpy arrays of numbers.

    The typed getters refuse a value of another type by name; a missing key without a default is refused too.
    """

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def _optional(self, key: str, kind: type[T]) -> T | None:
        value = self._values.get(key)
        # a boolean is an int to Python, but no count
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise ModelLoadError(
                f"{self.path}: {key} should be of type {kind.__name__}, but is {_shown(value)}"
            )
        return value

    def _required(self, key: str, kind: type[T]) -> T:
        value = self._optional(key, kind)
        if value is None:
            raise ModelLoadError(f"{self.path}: metadata key {key!r} is missing")
        return value

    def text(self, key: str) -> str:
        return self._required(key, str)

    def optional_text(self, key: str) -> str | None:
        return self._optional(key, str)

    def integer(self, key: str) -> int:
        return self._required(key, int)

    def optional_integer(self, key: str) -> int | None:
        return self._optional(key, int)

    def optional_number(self, key: str) -> float | None:
        value = self._values.get(key)
        return float(value) if type(value) is int else self._optional(key, float)

    def flag(self, key: str) -> bool | None:
        return self._optional(key, bool)

    def texts(self, key: str) -> list[str]:
        return self._required(key, list)

    def optional_array(self, key: str) -> np.ndarray[Any, Any] | None:
        return self._optional(key, np.ndarray)


class GGUFReader:
    """An open file. ``metadata`` and ``entries`` are read at once, the bytes of a tensor when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = _map_file(path)
        cursor = _Cursor(path, self._map)
        num_tensors, num_entries = _read_preamble(cursor)
        self.metadata = Metadata(path, _read_metadata(cursor, num_entries))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            cursor.fail("general.alignment", f"{_shown(alignment)} is no power of two")
        self.entries = _read_tensor_table(cursor, num_tensors, alignment)

    def data(self, entry: TensorEntry) -> Bytes:
        """The packed rows of a tensor, ``[..., row_bytes]`` uint8: a view of the mapped file, private if written to."""
        flat = np.frombuffer(self._map, dtype=np.uint8, count=entry.num_bytes, offset=entry.offset)
        return flat.reshape(*entry.shape[:-1], entry.block_format.row_bytes(entry.shape[-1]))


def _map_file(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # copy-on-write, because torch warns about tensors over memory that it must not write to
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be opened: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path}: is empty, so no GGUF file") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Cursor:
    """A position in the file that never leaves it."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0

    def fail(self, field: str, problem: str) -> Never:
        raise ModelLoadError(f"{self.path}: {field}: {problem}; the file is damaged or no GGUF file")

    def advance(self, num_bytes: int, field: str) -> int:
        """Steps over ``num_bytes`` and returns where they begin."""
        start = self.position
        if num_bytes > self.size - start:
            self.fail(field, f"needs {num_bytes} bytes at {start}, but the file ends at {self.size}")
        self.position = start + num_bytes
        return start

    def unsigned(self, code: str, field: str) -> int:
        start = self.advance(struct.calcsize(code), field)
        return struct.unpack_from(code, self.buffer, start)[0]

    def text(self, field: str) -> str:
        num_bytes = self.unsigned("<Q", field)
        start = self.advance(num_bytes, field)
        try:
            return self.buffer[start : start + num_bytes].decode()
        except UnicodeDecodeError as error:
            self.fail(field, f"text at {start} is no UTF-8 ({error.reason})")

    def count(self, num: int, min_bytes: int, field: str) -> int:
        """``num``, if that many things of at least ``min_bytes`` each can follow."""
        if num * min_bytes > self.size - self.position:
            self.fail(field, f"{num} cannot be true of a file of {self.size} bytes")
        return num

    def texts(self, num: int, field: str) -> list[str]:
        """Vocabularies have hundreds of thousands of strings, hence no function call for each."""
        self.count(num, _MIN_STRING_BYTES, field)
        buffer, size, position = self.buffer, self.size, self.position
        length_at = struct.Struct("<Q").unpack_from
        found: list[str] = []
        try:
            for _ in range(num):
                start = position + 8
                position = start + length_at(buffer, position)[0]
                if position > size:
                    self.fail(
                        field, f"string {len(found)} at {start} reaches past the end of the file at {size}"
                    )
                found.append(buffer[start:position].decode())
        except UnicodeDecodeError as error:
            self.fail(field, f"string {len(found)} is no UTF-8 ({error.reason})")
        except struct.error:
            self.fail(field, f"string {len(found)} begins past the end of the file at {size}")
        self.position = position
        return found


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    start = cursor.advance(4, "magic")
    magic = cursor.buffer[start : start + 4]
    if magic != b"GGUF":
        cursor.fail("magic", f"starts with {magic!r} instead of b'GGUF'")
    version = cursor.unsigned("<I", "version")
    if version not in _VERSIONS:
        if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
            raise ModelLoadError(
                f"{cursor.path}: is a big-endian GGUF file; only little-endian ones can be read"
            )
        raise ModelLoadError(f"{cursor.path}: is of GGUF version {version}; versions 2 and 3 can be read")
    num_tensors = cursor.unsigned("<Q", "tensor count")
    num_entries = cursor.unsigned("<Q", "metadata count")
    cursor.count(num_tensors, _MIN_TENSOR_BYTES, "tensor count")
    cursor.count(num_entries, _MIN_ENTRY_BYTES, "metadata count")
    return num_tensors, num_entries


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for index in range(num_entries):
        key = cursor.text(f"metadata key {index}")
        if key in values:
            cursor.fail(key, "is there twice")
        values[key] = _read_value(cursor, cursor.unsigned("<I", key), key)
    return values


def _read_value(cursor: _Cursor, kind: int, key: str) -> Any:
    if kind == _STRING:
        return cursor.text(key)
    if kind == _ARRAY:
        return _read_array(cursor, key)
    return _read_numbers(cursor, kind, 1, key)[0].item()


def _read_array(cursor: _Cursor, key: str) -> list[str] | np.ndarray[Any, Any]:
    kind = cursor.unsigned("<I", key)
    num = cursor.unsigned("<Q", key)
    if kind == _STRING:
        return cursor.texts(num, key)
    return _read_numbers(cursor, kind, num, key)


def _read_numbers(cursor: _Cursor, kind: int, num: int, key: str) -> np.ndarray[Any, Any]:
    code = _SCALARS.get(kind)
    if code is None:
        cursor.fail(key, f"value type {kind} is not one that can be read")
    dtype = np.dtype(code)
    start = cursor.advance(num * dtype.itemsize, key)
    if num == 0:
        return np.empty(0, dtype)
    if dtype.kind == "b":
        # a byte other than 0 and 1 would make a boolean that is neither true nor false
        return np.frombuffer(cursor.buffer, np.uint8, num, start) != 0
    return np.frombuffer(cursor.buffer, dtype, num, start)


def _read_tensor_table(cursor: _Cursor, num_tensors: int, alignment: int) -> dict[str, TensorEntry]:
    rows = []
    for index in range(num_tensors):
        name = cursor.text(f"name of tensor {index}")
        num_dims = cursor.unsigned("<I", f"dimensions of tensor {name!r}")
        if not 1 <= num_dims <= _MAX_DIMENSIONS:
            cursor.fail(f"tensor {name!r}", f"has {num_dims} dimensions; 1 to {_MAX_DIMENSIONS} are possible")
        dims = [cursor.unsigned("<Q", f"shape of tensor {name!r}") for _ in range(num_dims)]
        type_id = cursor.unsigned("<I", f"type of tensor {name!r}")
        offset = cursor.unsigned("<Q", f"offset of tensor {name!r}")
        rows.append((name, tuple(reversed(dims)), type_id, offset))
    data_start = -(-cursor.position // alignment) * alignment
    entries: dict[str, TensorEntry] = {}
    for name, shape, type_id, offset in rows:
        if name in entries:
            cursor.fail(f"tensor {name!r}", "is there twice")
        entries[name] = _checked_entry(cursor, name, shape, type_id, data_start, offset, alignment)
    return entries


def _checked_entry(
    cursor: _Cursor,
    name: str,
    shape: tuple[int, ...],
    type_id: int,
    data_start: int,
    offset: int,
    alignment: int,
) -> TensorEntry:
    field = f"tensor {name!r}"
    try:
        found = block_format(type_id, name)
    except ModelLoadError as error:
        raise ModelLoadError(f"{cursor.path}: {error}") from None
    if 0 in shape:
        cursor.fail(field, f"has the shape {shape}")
    if offset % alignment:
        cursor.fail(field, f"offset {offset} is no multiple of the alignment {alignment}")
    try:
        num_bytes = found.row_bytes(shape[-1])
    except ValueError as error:
        cursor.fail(field, str(error))
    for size in shape[:-1]:
        num_bytes *= size
    end = data_start + offset + num_bytes
    if end > cursor.size:
        raise ModelLoadError(
            f"{cursor.path}: tensor {name!r} of shape {list(shape)} ends at byte {end}, but the file at {cursor.size}; "
            "it is cut short or damaged: fetch it again"
        )
    return TensorEntry(name, shape, found, data_start + offset, num_bytes)
