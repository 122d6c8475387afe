"""Collectives between the ranks of one model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ProcessGroup:
    """Who takes part. ``init_method`` is a torch.distributed rendezvous, a file on this machine or an address."""

    rank: int
    world_size: int
    init_method: str


class Communicator(ABC):
    rank: int
    world_size: int
    graph_safe: ClassVar[bool] = False
    """Whether collectives may be recorded in a graph, which every rank replays alike."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; may work in place, the result is what counts. Bitwise equal on every rank."""

    @abstractmethod
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors, all of one shape, concatenated along ``dim`` in rank order."""

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor on every rank, of at least one dimension; those of the others only say of what shape and
        dtype it is, and may be overwritten. By `all_gather`, where a communicator knows no shorter way."""
        return self.all_gather(tensor, 0)[: len(tensor)]

    @abstractmethod
    def close(self) -> None: ...


class SoloCommunicator(Communicator):
    """The only rank there is: every collective is the identity."""

    rank = 0
    world_size = 1
    graph_safe = True

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        return
