"""`StagingBuffer`: all arrays of a step to the device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from inferplane.api.device import DeviceRuntime, Event

ALIGNMENT_BYTES = 256
"""Of each array: as allocators of devices align, so that no kernel has to look."""

NUM_HOST_BUFFERS = 2
"""One can be filled while the device still copies from the other."""


MAX_KEPT_VIEWS = 1024


class StagingBuffer:
    """Memory on the device, and buffers on the host that are copied into it by turns.

    What `copy` returns are views of the one piece of device memory. The next call overwrites it, after all work that
    was queued before that call.
    """

    def __init__(self, runtime: DeviceRuntime, num_bytes: int) -> None:
        self._runtime = runtime
        self._turn = 0
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        runtime = self._runtime
        self._host = [runtime.pin((num_bytes,), torch.uint8) for _ in range(NUM_HOST_BUFFERS)]
        self._bytes = [host.numpy() for host in self._host]
        self._copied: list[Event | None] = [None] * NUM_HOST_BUFFERS
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=runtime.torch_device)
        self._views: dict[tuple[int, np.dtype[Any], tuple[int, ...]], torch.Tensor] = {}

    def copy(self, arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        """The arrays on the device, each where those before it end; so arrays of the same sizes lie where they lay."""
        offsets = _offsets(arrays)
        num_bytes = offsets[-1]
        if num_bytes > len(self._device):
            self._wait_for_all()
            self._allocate(2 * num_bytes)
        turn = self._turn = (self._turn + 1) % NUM_HOST_BUFFERS
        if (copied := self._copied[turn]) is not None:
            copied.wait()
        host = self._bytes[turn]
        for offset, array in zip(offsets, arrays):
            host[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8)
        self._runtime.copy_to_device(self._device[:num_bytes], self._host[turn][:num_bytes])
        self._copied[turn] = self._runtime.record_event()
        return [self._view(offset, array) for offset, array in zip(offsets, arrays)]

    def _view(self, offset: int, array: np.ndarray) -> torch.Tensor:
        """Device memory from ``offset`` on, in the shape and type of the array. To make a view takes the host longer
        than to copy the array, and most steps need those of the step before."""
        key = (offset, array.dtype, array.shape)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= MAX_KEPT_VIEWS:
                self._views.clear()
            dtype = _TORCH_DTYPE[array.dtype]
            view = self._device[offset : offset + array.nbytes].view(dtype).view(array.shape)
            self._views[key] = view
        return view

    def _wait_for_all(self) -> None:
        for copied in self._copied:
            if copied is not None:
                copied.wait()


_TORCH_DTYPE = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64}


def _offsets(arrays: Sequence[np.ndarray]) -> list[int]:
    """Of each array, and the end of the last."""
    offsets = [0]
    for array in arrays:
        offsets.append(-(-(offsets[-1] + array.nbytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    return offsets
