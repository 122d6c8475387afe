"""FlashAttention-4 as a library: imported and compiled in the background, and what it compiled kept on disk.

It compiles a kernel at the first call of each kind, for seconds, and distinguishes kinds that share a kernel. Here a
model's layers of one shape are one kind: a thread makes a small call of it while the main one loads weights, and all
calls are given bounds with which they are of that kind.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch

from inferplane.api.attention import AttentionQuery
from inferplane.api.kv import SlidingWindowSpec
from inferplane_cuda import cute_compiling, cute_packages

CAPABILITY = "bulk_tensor_copy"
"""Of GPUs that it is used with."""
ONE_KERNEL_TOKENS = 1024
"""The longest prompt of a step is said to have so many at least: it is compiled once more for prompts that fit in a
tile, into the same."""
MAX_REQUESTS = 256
"""From one more on it looks requests up in another way, which are further kernels."""
CACHE_ENABLED, CACHE_DIR = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
"""The library's environment variables: whether it keeps compiled kernels on disk, and where."""

logger = logging.getLogger("inferplane.attention")


@dataclass(frozen=True)
class Variant:
    """Layers that have one kernel."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    soft_cap: float | None
    has_window: bool
    has_sinks: bool

    @classmethod
    def of(cls, query: AttentionQuery) -> Variant:
        layer = query.layer
        return cls(
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            block_size=layer.spec.block_size,
            dtype=query.dtype,
            soft_cap=layer.soft_cap,
            has_window=isinstance(layer.spec, SlidingWindowSpec),
            has_sinks=layer.has_sinks,
        )

    def call(self, attend: Callable[..., Any], device: torch.device) -> None:
        """A prompt of one token, whose key and value are zeros."""
        q = torch.zeros(1, self.num_heads, self.head_dim, dtype=self.dtype, device=device)
        kv = q.new_zeros(2, 1, self.block_size, self.num_kv_heads, self.head_dim)
        ints = torch.tensor([0, 1], dtype=torch.int32, device=device)
        attend(
            q,
            kv[0],
            kv[1],
            cu_seqlens_q=ints,
            max_seqlen_q=ONE_KERNEL_TOKENS,
            max_seqlen_k=1,
            seqused_k=ints[1:],
            page_table=ints[:1].unsqueeze(0),
            softmax_scale=1.0,
            causal=True,
            window_size=(0, 0) if self.has_window else (None, None),
            learnable_sink=q.new_zeros(self.num_heads, dtype=torch.float32) if self.has_sinks else None,
            softcap=self.soft_cap or 0.0,
        )


def missing_package() -> str | None:
    """The first of the packages that is not installed; None when all are."""
    return cute_packages.missing_package("flash_attn.cute", "flash-attn-4")


def start_compiling(variant: Variant, device: torch.device) -> None:
    cute_compiling.start_compiling(variant, partial(_launch, variant, device), device)


def attend() -> Callable[..., Any] | None:
    """``flash_attn_varlen_func``, once nothing is being compiled; None where it cannot be imported."""
    cute_compiling.wait()
    return _imported()


def _launch(variant: Variant, device: torch.device) -> None:
    attend = _imported()
    if attend is not None:
        variant.call(attend, device)


@cache
def _imported() -> Callable[..., Any] | None:
    _keep_on_disk()
    without = "steps with prompts use the Triton kernel, which is slower"
    return cute_packages.import_or_warn("FlashAttention", _import, logger, without)


def _import() -> Callable[..., Any]:
    from flash_attn.cute import flash_attn_varlen_func

    found: Callable[..., Any] = flash_attn_varlen_func
    return found


def _keep_on_disk() -> None:
    """In a folder of the user's own, unless the environment says otherwise. It is read when the library is imported."""
    if CACHE_ENABLED in os.environ:
        return
    folder = cute_compiling.cache_folder("flash-attention")
    if folder is None:
        return  # it compiles at every start, as it does by itself
    os.environ[CACHE_ENABLED] = "1"
    os.environ.setdefault(CACHE_DIR, str(folder))
