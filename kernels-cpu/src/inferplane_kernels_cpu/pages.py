"""Memory for weights, in huge pages where the system has them: reading a model would else walk the page tables every
4 KB, and the processor fetches ahead within a page only."""

from __future__ import annotations

import mmap

import torch

_HUGE_PAGE = 2 << 20
_CHUNK = 32 << 20
_ALIGNMENT = 64


class Pages:
    """Hands out parts of large pieces. A piece is given back to the system when nobody has a part of it any more."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 ``[num_bytes]`` of zeros, aligned to 64 bytes."""
        size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        if size > _CHUNK // 2:
            return _huge(size)[:num_bytes]
        if size > len(self._rest):
            self._rest = _huge(_CHUNK)
        taken, self._rest = self._rest[:num_bytes], self._rest[size:]
        return taken


weight_pages = Pages()
"""Of all weights of the process."""


def move_weight(weight: torch.Tensor) -> None:
    """Copies the numbers into `weight_pages`, contiguously, and makes that the tensor's own memory: whoever else holds
    the tensor reads them there as well, and what it lay in before is free if no other tensor shares it."""
    moved = weight_pages.take(weight.nbytes).view(weight.dtype).view(weight.shape)
    weight.set_(moved.copy_(weight))


def _huge(num_bytes: int) -> torch.Tensor:
    # private: of shared memory, which is the default, systems make no huge pages unless they are told to
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]
