"""Kestrel cards as a torch device. A card is simulated; nothing outside this file can tell.

A tensor on a card has a shape, strides and a dtype, but no address: its numbers lie in memory that only the card's
kernels see. Handing it to a host function, or a host tensor to a kernel, raises an error as on any real card.
torch's own kernels for the card are in `launch`, which every operation reaches through the PrivateUse1 dispatch key.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import backend_registration

NAME = "kestrel"
HOST = torch.device("cpu")


@dataclass
class CardMemory:
    """What of a card's memory is taken, counted by the tensors that are alive."""

    total_bytes: int
    used_bytes: int = 0
    _holders: Counter[int] = field(default_factory=Counter)

    def hold(self, owner: object, memory: torch.Tensor) -> None:
        """Takes the memory until ``owner`` and all its views are gone. Raises `torch.OutOfMemoryError`."""
        storage = memory.untyped_storage()
        address, num_bytes = storage.data_ptr(), storage.nbytes()
        if not num_bytes:
            return
        if not self._holders[address]:
            if self.used_bytes + num_bytes > self.total_bytes:
                free = self.total_bytes - self.used_bytes
                raise torch.OutOfMemoryError(f"{num_bytes} bytes asked of a Kestrel card with {free} free")
            self.used_bytes += num_bytes
        self._holders[address] += 1
        weakref.finalize(owner, self._release, address, num_bytes).atexit = False

    def _release(self, address: int, num_bytes: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            self.used_bytes -= num_bytes


_connected: dict[int, CardMemory] = {}


class KestrelTensor(torch.Tensor):
    """What the host holds of a tensor on a card."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    _memory: torch.Tensor

    @staticmethod
    def on_card(memory: torch.Tensor, index: int) -> KestrelTensor:
        with torch.inference_mode(
            False
        ):  # or a view, made in that mode, of a tensor from outside could not be tracked
            tensor = torch.Tensor._make_wrapper_subclass(
                KestrelTensor,
                memory.size(),
                strides=memory.stride(),
                storage_offset=memory.storage_offset(),
                dtype=memory.dtype,
                device=torch.device(NAME, index),
            )
        tensor._memory = memory
        _connected[index].hold(tensor, memory)
        return tensor

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"{self.cpu()!r} on {self.device}"

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _dispatch(op, *args, **(kwargs or {}))


def connect(index: int, total_bytes: int) -> torch.device:
    """The torch device of a card, which may be connected already."""
    _register()
    _connected.setdefault(index, CardMemory(total_bytes))
    return torch.device(NAME, index)


def memory_of(device: torch.device) -> CardMemory:
    return _connected[device.index]


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function over a card's memory one over tensors on that card."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return launch(function, args, kwargs)

    return call


def launch(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``function`` on the card that the tensors among its arguments are on, or that ``device`` names."""
    owners: dict[int, KestrelTensor] = {}

    def inner(leaf: Any) -> Any:
        if isinstance(leaf, KestrelTensor):
            owners[id(leaf._memory)] = leaf
            return leaf._memory
        if isinstance(leaf, torch.Tensor) and leaf.dim():
            raise RuntimeError(
                f"{function}: a tensor of shape {list(leaf.shape)} is in host memory, not on the card"
            )
        return HOST if isinstance(leaf, torch.device) else leaf

    def outer(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        owner = owners.get(id(leaf))  # what works in place returns its argument
        return KestrelTensor.on_card(leaf, index) if owner is None else owner

    inner_args = _each(args, inner)
    inner_kwargs = {name: _each(value, inner) for name, value in kwargs.items()}
    devices = {tensor.device for tensor in owners.values()} or {kwargs["device"]}
    if len(devices) > 1:
        raise RuntimeError(f"{function}: tensors on several cards: {', '.join(sorted(map(str, devices)))}")
    index = devices.pop().index or 0
    return _each(function(*inner_args, **inner_kwargs), outer)


def _each(value: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` of every leaf of nested lists and tuples."""
    if isinstance(value, (list, tuple)):
        return type(value)([_each(item, change) for item in value])
    return change(value)


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    name = op._schema.name
    if (
        name == "aten::to"
    ):  # whole only in inference mode; its parts say whether anything is copied, and where to
        return op.decompose(*args, **kwargs)
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    if name == "aten::_to_copy" and kwargs.get("device", args[0].device).type != NAME:
        return op(args[0]._memory, **kwargs)
    return launch(op, args, kwargs)


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    memories = (x._memory if isinstance(x, KestrelTensor) else x for x in (target, source))
    torch.ops.aten.copy_(*memories)
    return target


class _CardModule:
    """What torch looks for under ``torch.kestrel``."""

    def __getattr__(self, name: str) -> Any:
        answers = {
            "is_available": True,
            "is_initialized": True,
            "_is_in_bad_fork": False,
            "current_device": 0,
            "device_count": len(_connected),
            "manual_seed_all": None,
        }
        if name not in answers:
            raise AttributeError(name)
        return lambda *args: answers[name]


@functools.cache
def _register() -> tuple[torch.library.Library, ...]:
    """Once a process. Registrations live as long as the libraries that are returned."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, _CardModule())
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(_dispatch, "PrivateUse1")
    aten.impl("copy_", _copy, "PrivateUse1")  # torch.tensor() calls it in a way that no fallback can answer
    return everything, aten
