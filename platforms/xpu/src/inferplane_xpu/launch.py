"""How the platform launches the portable Triton kernels."""

from __future__ import annotations

from inferplane_torch_accelerator.launch import Launch

LAUNCH = Launch("intel")
"""With the kernels' own defaults: nobody has measured others."""
