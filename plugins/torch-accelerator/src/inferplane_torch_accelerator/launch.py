"""How a platform launches the portable Triton kernels on its devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

import torch

from inferplane_kernels_triton.tuning import TuningTable
from inferplane_torch_accelerator.triton_build import why_no_triton

Config = TypeVar("Config")


class Launch:
    """What may be asked of the compiler, and which configurations were found best for a device."""

    def __init__(
        self,
        backend: str,
        *,
        pdl: Callable[[torch.device], bool] | None = None,
        tuning_file: Callable[[torch.device], Path | None] | None = None,
    ) -> None:
        self.backend = backend
        """Of triton's compiler: ``nvidia``, ``amd`` or ``intel``."""
        self._pdl = pdl
        self.tuning_file = tuning_file

    def why_not(self) -> str | None:
        """None where the installed triton compiles for the platform's devices."""
        return why_no_triton(self.backend)

    @cache  # noqa: B019 - a platform has one of these, which lives as long as the process
    def pdl(self, device: torch.device) -> bool:
        """Whether a kernel may start while the one before it still runs."""
        return self._pdl is not None and self._pdl(device)

    def config(self, kernel: str, shape: tuple[int, ...], default: Config, like: torch.Tensor) -> Config:
        """The configuration of ``kernel`` at the measured shape nearest to ``shape``, for operands like ``like``."""
        return self._table(like).config(kernel, shape, default)

    def measured(
        self, kernel: str, shape: tuple[int, ...], default: Config, like: torch.Tensor
    ) -> Config | None:
        """The same for just this shape; None where it was not measured."""
        return self._table(like).measured(kernel, shape, default)

    def _table(self, like: torch.Tensor) -> TuningTable:
        """Tables are for half precision; tiles that are right for it need not fit in float32."""
        return _NOTHING if like.dtype == torch.float32 else self._table_of(like.device)

    @cache  # noqa: B019 - as above
    def _table_of(self, device: torch.device) -> TuningTable:
        file = self.tuning_file(device) if self.tuning_file is not None else None
        return TuningTable.read(file) if file is not None else _NOTHING


_NOTHING = TuningTable({})
