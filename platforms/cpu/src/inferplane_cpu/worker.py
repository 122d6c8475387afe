"""The CPU's worker. It does what the core's does: placement and threads are the runtime's."""

from __future__ import annotations

from inferplane.api.worker import ModelWorker


class CpuWorker(ModelWorker):
    """One rank on the host."""
