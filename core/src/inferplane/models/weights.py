"""Filling a model: each tensor of a checkpoint finds its slot, each slot its tensor, or the error names them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from inferplane.api.quant import PLAIN_DTYPES
from inferplane.layers.layer import Layer, WeightSlot, walk_layers
from inferplane.models.errors import ModelLoadError

# Buffers of older checkpoints that follow from the configuration.
_DERIVED = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
_MAX_NAMED = 20


def load_weights(model: object, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Fills the layers of ``model`` from a checkpoint's tensors by their names, in any order.

    Each tensor is copied in this rank's part only, straight to its place and dtype. A layer is finished, and its
    weight handed to a kernel, as soon as it has all its tensors, so that no second copy of the model ever exists.
    Raises `ModelLoadError` naming the tensors that are missing, unexpected, repeated, or of a wrong shape or type.
    """
    filling = _Filling(model)
    for name, tensor in tensors:
        filling.take(name, tensor)
    filling.finish()


def weight_slots(model: object) -> list[WeightSlot]:
    """What a checkpoint must hold, and what it may."""
    return [slot for layer in walk_layers(model) for slot in layer.weight_slots()]


class _Filling:
    """Which slots still wait for their tensor, and what was wrong so far."""

    def __init__(self, model: object) -> None:
        self._model_name = type(model).__name__
        self._place: dict[str, tuple[WeightSlot, Layer]] = {}
        self._waiting: dict[Layer, set[str]] = {}
        self._deferred: list[Layer] = []
        self._filled: set[str] = set()
        self._faults: dict[str, list[str]] = {}
        for layer in walk_layers(model):
            self._expect(layer)

    def take(self, name: str, tensor: torch.Tensor) -> None:
        place = self._place.get(name)
        if place is None:
            if not name.endswith(_DERIVED):
                self._fault("unexpected", name)
            return
        slot, layer = place
        tensor = _with_last_ones(tensor, slot)
        if fault := _misfit(slot, tensor, is_repeated=name in self._filled):
            self._fault(*fault)
        elif not self._faults:
            slot.copy(tensor)
        self._filled.add(name)
        self._waiting[layer].discard(name)
        if not self._waiting[layer] and layer not in self._deferred and not self._faults:
            layer.finish_loading()

    def finish(self) -> None:
        for name, (slot, _) in self._place.items():
            if slot.is_required and name not in self._filled:
                self._fault("missing", name)
        if self._faults:
            raise ModelLoadError(f"the checkpoint does not fit {self._model_name}: {_listing(self._faults)}")
        for layer in self._deferred:
            layer.finish_loading()

    def _expect(self, layer: Layer) -> None:
        slots = layer.weight_slots()
        for slot in slots:
            if slot.name in self._place:
                raise ModelLoadError(f"two layers of {self._model_name} both take the tensor {slot.name!r}")
            self._place[slot.name] = slot, layer
        self._waiting[layer] = {slot.name for slot in slots}
        # what an optional tensor leaves open is known only when there are no more
        if not all(slot.is_required for slot in slots):
            self._deferred.append(layer)

    def _fault(self, kind: str, text: str) -> None:
        self._faults.setdefault(kind, []).append(text)


def _misfit(slot: WeightSlot, tensor: torch.Tensor, *, is_repeated: bool) -> tuple[str, str] | None:
    if is_repeated:
        return "repeated", slot.name
    if not _fits(tensor.shape, slot.shape):
        wanted = ", ".join("any" if size is None else str(size) for size in slot.shape)
        return "wrong shape", f"{slot.name} is {list(tensor.shape)} and should be [{wanted}]"
    if tensor.dtype not in slot.dtypes:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if slot.dtypes == PLAIN_DTYPES:
            return "wrong type", f"{slot.name} is {dtype}, which means nothing without a quantization format"
        wanted = " or ".join(str(each).removeprefix("torch.") for each in slot.dtypes)
        return "wrong type", f"{slot.name} is {dtype} and should be {wanted}"
    return None


def _with_last_ones(tensor: torch.Tensor, slot: WeightSlot) -> torch.Tensor:
    """Single numbers may be stored without a dimension, and parts of a quantized matrix without last ones of one: a
    scale is a single number, or as many as a matrix has rows."""
    missing = len(slot.shape) - tensor.ndim
    if missing <= 0 or (tensor.ndim > 0 and slot.dtypes == PLAIN_DTYPES):
        return tensor
    shape = (*tensor.shape, *[1] * missing)
    return tensor.reshape(shape) if _fits(shape, slot.shape) else tensor


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(want in (None, size) for size, want in zip(shape, wanted))


def _listing(faults: dict[str, list[str]]) -> str:
    lines = []
    for kind, texts in faults.items():
        more = len(texts) - _MAX_NAMED
        ending = f" and {more} more" if more > 0 else ""
        lines.append(f"{kind}: {', '.join(texts[:_MAX_NAMED])}{ending}")
    return "; ".join(lines)


def dummy_tensors(
    slots: Sequence[WeightSlot], seed: int = 0, device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Small random values for every required slot, on ``device``; the same for the same name, shape and seed.

    Rows are windows on one short pool of noise, which lies on the device: so a model of any size is drawn as fast as
    it can be copied there, and without memory of its own. Vectors called ``weight`` are scales of norms, around 1.
    """
    needed = [slot for slot in slots if slot.is_required]
    longest = max((sum(_rows_and_columns(slot)) for slot in needed), default=0)
    pool_size = max(1 << 20, 2 * longest)
    pool = torch.randn(pool_size, generator=torch.Generator().manual_seed(seed)).mul_(0.02).to(device)
    for slot in needed:
        rows, columns = _rows_and_columns(slot)
        room = pool_size - columns - rows
        step = 1 + room // (2 * rows)
        start = zlib.crc32(slot.name.encode()) % (1 + room - (step - 1) * rows)
        noise = pool.as_strided((rows, columns), (step, 1), start).reshape(_known_shape(slot))
        if slot.dtypes != PLAIN_DTYPES:
            yield slot.name, _as_type(noise, slot.dtypes[0])
            continue
        is_scale = len(slot.shape) == 1 and slot.name.endswith(".weight")
        yield slot.name, noise + 1 if is_scale else noise


def _as_type(noise: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The noise's own numbers, or random bits of a whole number's type; a vector of those are indices, and all 0."""
    if dtype.is_floating_point:
        return noise.to(dtype)
    return torch.zeros_like(noise, dtype=dtype) if noise.ndim == 1 else (noise * 1e11).long().to(dtype)


def _known_shape(slot: WeightSlot) -> tuple[int, ...]:
    sizes = tuple(size for size in slot.shape if size is not None)
    if len(sizes) < len(slot.shape):
        raise ModelLoadError(
            f"{slot.name}: only a checkpoint knows its size, so that load_format dummy cannot draw it"
        )
    return sizes


def _rows_and_columns(slot: WeightSlot) -> tuple[int, int]:
    *rows, columns = (1, *_known_shape(slot))
    return prod(rows), columns
