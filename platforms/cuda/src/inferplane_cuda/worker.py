"""The CUDA platform's worker. It does what the core's does: placement, memory and copies are the runtime's."""

from __future__ import annotations

from inferplane.api.worker import ModelWorker


class CudaWorker(ModelWorker):
    """One rank on one GPU."""
