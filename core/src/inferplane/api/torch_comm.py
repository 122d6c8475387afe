"""A communicator over `torch.distributed`, for platforms whose devices it has a backend for."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from inferplane.api.comm import Communicator, ProcessGroup

JOIN_TIMEOUT_S = 120.0
"""A rank that has died must fail the others' collectives, not hang them; also the longest wait for a slow joiner."""


class TorchCommunicator(Communicator):
    """The process group of this process. Raises RuntimeError when the process is a member of one already."""

    def __init__(self, group: ProcessGroup, backend: str, timeout_s: float = JOIN_TIMEOUT_S) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "this process is a member of a torch.distributed group already; a worker needs its own process"
            )
        self.rank = group.rank
        self.world_size = group.world_size
        dist.init_process_group(
            backend,
            init_method=group.init_method,
            rank=group.rank,
            world_size=group.world_size,
            timeout=timedelta(seconds=timeout_s),
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [
            torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.world_size)
        ]
        dist.all_gather(parts, tensor.contiguous())
        return torch.cat(parts, dim=dim)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
