"""Collectives between cards, by way of the host."""

from __future__ import annotations

import torch

from inferplane.api import ProcessGroup
from inferplane.api.torch_comm import TorchCommunicator


class KestrelCommunicator(TorchCommunicator):
    """Cards have no link of their own, so tensors meet in host memory."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group, "gloo")

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor.cpu()).to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return super().all_gather(tensor.cpu(), dim).to(tensor.device)
