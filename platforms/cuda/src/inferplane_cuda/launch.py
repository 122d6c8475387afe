"""How the platform launches its Triton kernels."""

from __future__ import annotations

DEPENDENT_LAUNCH = False
"""Whether a kernel may start while the one before it still runs (GPUs with ``bulk_tensor_copy`` only)."""
