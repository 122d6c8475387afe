"""What FlashAttention-4 needs and suits, without importing it."""

from __future__ import annotations

from inferplane_cuda import cute_packages

CAPABILITY = "bulk_tensor_copy"
"""Of GPUs that it is used with."""
BLOCK_SIZE = 128
"""Tokens that it reads at a time, for most heads: a block of as many is one bulk copy."""


def missing_package() -> str | None:
    """The first of the packages that is not installed; None when all are."""
    return cute_packages.missing_package("flash_attn.cute", "flash-attn-4")
