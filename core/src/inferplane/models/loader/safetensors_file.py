"""Reads one safetensors file: a JSON header that places every tensor, and the mapped bytes.

The header is untrusted: places are checked against each other and the size of the file, so that a damaged or
shortened file is refused by name before a model is built from it.
"""

from __future__ import annotations

import json
import mmap
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from inferplane.models.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

_MAX_HEADER_BYTES = 100_000_000
_MAX_ELEMENTS = 1 << 63

# torch's name and the size in bytes of each type
_DTYPES = {
    "F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "I64": ("int64", 8), "I32": ("int32", 4), "I16": ("int16", 2), "I8": ("int8", 1),
    "U64": ("uint64", 8), "U32": ("uint32", 4), "U16": ("uint16", 2), "U8": ("uint8", 1), "BOOL": ("bool", 1),
}  # fmt: skip


@dataclass(frozen=True)
class TensorPlace:
    dtype: str
    """torch's name of the type."""
    shape: tuple[int, ...]
    offset: int
    """Of the first byte, from the start of the file."""
    num_bytes: int


class SafetensorsFile:
    """An open file; ``places`` holds what its header says of each tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = self._map_file()
        header, data_start = self._header()
        self.places = {
            name: self._place(name, fields, data_start)
            for name, fields in header.items()
            if name != "__metadata__"
        }
        self._check_coverage(data_start)

    def tensor(self, name: str) -> torch.Tensor:
        """A view of the mapped file, private if written to."""
        import torch

        place = self.places[name]
        dtype = getattr(torch, place.dtype)
        if place.num_bytes == 0:
            return torch.empty(place.shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=place.num_bytes, offset=place.offset)
        if place.offset % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).reshape(place.shape)

    def _fail(self, problem: str) -> Never:
        raise ModelLoadError(f"{self.path}: {problem}; the file is damaged or cut short: fetch it again")

    def _map_file(self) -> mmap.mmap:
        try:
            with self.path.open("rb") as file:
                # copy-on-write, because torch warns about tensors over memory that it must not write to
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelLoadError(f"{self.path}: cannot be opened: {error.strerror}") from error
        except ValueError:
            self._fail("is empty")

    def _header(self) -> tuple[dict[str, Any], int]:
        size = len(self._map)
        num_bytes = int.from_bytes(self._map[:8], "little")
        if size < 8 or num_bytes > min(size - 8, _MAX_HEADER_BYTES):
            self._fail(f"its header should have {num_bytes} bytes, but the file has {size}")
        try:
            header = json.loads(self._map[8 : 8 + num_bytes], object_pairs_hook=_without_repeats)
        except (ValueError, RecursionError) as error:
            self._fail(f"its header cannot be read ({error})")
        if not isinstance(header, dict):
            self._fail("its header is no table of tensors")
        return header, 8 + num_bytes

    def _place(self, name: str, fields: Any, data_start: int) -> TensorPlace:
        try:
            code, shape, (begin, end) = fields["dtype"], fields["shape"], fields["data_offsets"]
        except (TypeError, KeyError, ValueError):
            self._fail(f"tensor {name!r} has no dtype, shape and data_offsets")
        if not isinstance(code, str) or code not in _DTYPES:
            raise ModelLoadError(
                f"{self.path}: tensor {name!r} is of type {code!r}; known types: {', '.join(_DTYPES)}"
            )
        if (
            not isinstance(shape, list)
            or not all(map(_is_count, shape))
            or not (_is_count(begin) and _is_count(end))
        ):
            self._fail(f"tensor {name!r} has the shape {shape} at {begin} to {end}")
        dtype, itemsize = _DTYPES[code]
        num_bytes = prod(shape) * itemsize
        if end - begin != num_bytes:
            self._fail(f"tensor {name!r} of {code} {shape} needs {num_bytes} bytes, but has {end - begin}")
        if data_start + end > len(self._map):
            self._fail(
                f"tensor {name!r} ends at byte {data_start + end}, but the file ends at {len(self._map)}"
            )
        return TensorPlace(dtype, tuple(shape), data_start + begin, num_bytes)

    def _check_coverage(self, data_start: int) -> None:
        """The format wants the tensors side by side, from the header to the end of the file."""
        position = data_start
        for name, place in sorted(self.places.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
            if place.offset != position:
                self._fail(f"tensor {name!r} begins at byte {place.offset} instead of {position}")
            position += place.num_bytes
        if position != len(self._map):
            self._fail(f"its tensors end at byte {position}, but the file ends at {len(self._map)}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_ELEMENTS


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name!r} is there twice")
        table[name] = value
    return table
