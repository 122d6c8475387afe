"""How a platform launches the portable Triton kernels on its devices."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from inferplane_kernels_triton.tuning import TuningTable

Config = TypeVar("Config")


class Launch:
    """What may be asked of the compiler, and which configurations were found best for a device."""

    def __init__(
        self, *, pdl: bool = False, tuning_file: Callable[[torch.device], Path | None] | None = None
    ) -> None:
        self.pdl = pdl
        """Whether a kernel may start while the one before it still runs."""
        self._tuning_file = tuning_file

    def config(self, kernel: str, shape: tuple[int, ...], default: Config, like: torch.Tensor) -> Config:
        """The configuration of ``kernel`` at ``shape`` for operands like ``like``. Tables are for half precision; tiles
        that are right for it need not fit in float32."""
        if self._tuning_file is None or like.dtype == torch.float32:
            return default
        return self._table(like.device).config(kernel, shape, default)

    @cache  # noqa: B019 - a platform has one of these, which lives as long as the process
    def _table(self, device: torch.device) -> TuningTable:
        file = self._tuning_file(device) if self._tuning_file is not None else None
        return TuningTable.read(file) if file is not None else TuningTable({})


def why_no_triton() -> str | None:
    """None where triton is installed."""
    return None if importlib.util.find_spec("triton") else "triton is not installed"
