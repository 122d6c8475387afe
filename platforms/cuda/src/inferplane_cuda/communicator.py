"""Collectives by NCCL, and sums of small tensors by one kernel that reads the other ranks' memory."""

from __future__ import annotations

import logging
import os
from itertools import permutations
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from inferplane.api.torch_comm import TorchCommunicator

if TYPE_CHECKING:
    from inferplane.api import ProcessGroup

ONE_SHOT_BYTES = 512 << 10
"""Most bytes that a rank reads of all others for one sum: beyond, NCCL moves fewer."""
ALIGNMENT_BYTES = 16
DTYPES = (torch.bfloat16, torch.float32)

logger = logging.getLogger("inferplane.comm")


class CudaCommunicator(TorchCommunicator):
    """NCCL needs several trips between the ranks for a sum. What decoding sums up is so small that these are nearly all
    of its time; there each rank reads all of the others' tensors at once and adds them up in the order of the ranks."""

    graph_safe = True

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """``device``: this rank's; rank r has the r-th from that of rank 0 on, on one machine."""
        super().__init__(group, "nccl")
        self._shared: torch.Tensor | None = None
        """uint8, of which every rank can read every other's; None where it cannot."""
        try:
            self._shared = self._share(device)
        except BaseException:
            self.close()
            raise

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._shared is None or not is_small(tensor, len(self._shared)):
            return super().all_reduce(tensor)
        tensor = tensor.contiguous()
        place = self._shared[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        total: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(
            place, tensor, "sum", dist.group.WORLD.group_name
        )
        return total

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, 0)
        return tensor

    def close(self) -> None:
        self._shared = None
        super().close()

    def _share(self, device: torch.device) -> torch.Tensor | None:
        first = device.index - self.rank
        # what follows are collectives, so that a rank asks about the others' pairs, too: all decide alike
        if self.world_size < 2 or not have_access(range(first, first + self.world_size)):
            return None
        # what is read here are ordinary addresses of the peers; setting up multicast would be for nothing
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        error: Exception | None = None
        try:
            from torch.distributed import _symmetric_memory

            shared = _symmetric_memory.empty(
                ONE_SHOT_BYTES // (self.world_size - 1) // ALIGNMENT_BYTES * ALIGNMENT_BYTES,
                dtype=torch.uint8,
                device=device,
            )
        except Exception as raised:  # of a driver, or another torch
            error = raised
        if self._can_all(error, device):  # else some would wait for the others in the rendezvous
            try:
                _symmetric_memory.rendezvous(shared, dist.group.WORLD)
            except Exception as raised:  # of a driver, or a container without the right
                error = raised
            if self._can_all(error, device):
                return shared
        logger.info("sums between ranks are all NCCL's: memory cannot be shared (%s)", error or "a peer")
        return None

    def _can_all(self, error: Exception | None, device: torch.device) -> bool:
        """Whether no rank has an error."""
        can = torch.tensor([error is None], dtype=torch.int32, device=device)
        dist.all_reduce(can, dist.ReduceOp.MIN)
        return bool(can.item())


def have_access(devices: range) -> bool:
    """Whether each of these GPUs can read the memory of all others."""
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in permutations(devices, 2))


def is_small(tensor: torch.Tensor, num_bytes: int) -> bool:
    """Whether one kernel sums it up, through ``num_bytes`` of shared memory."""
    size = tensor.nbytes
    return tensor.dtype in DTYPES and 0 < size <= num_bytes and size % ALIGNMENT_BYTES == 0
