"""What every launch shares: tiles that fit a dimension, and programmatic dependent launch.

With programmatic dependent launch (`pdl=True`, NVIDIA from capability 9.0) a kernel's programs may start while the
kernel before it on the stream still runs. Each kernel here therefore calls `begin` before it touches what an earlier
kernel wrote, or writes what an earlier one may still read; what needs neither (loading weights) it does before.
Positions, slots, block tables and sequence lengths are a step's inputs: they are in place, and an ordinary kernel has
run since, when the first of these starts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def begin(PDL: tl.constexpr):
    """Lets the next kernel start, and waits until the previous one has finished and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin_before_next(PDL: tl.constexpr):
    """As `begin`, but the next kernel starts no sooner than this one's wait is over: what was written before this one,
    the next may read before it waits itself."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


SECTOR_BYTES = tl.constexpr(32)
"""What the second-level cache brings in for one address: the other sectors of a line stay where they are."""


@triton.jit
def prefetch(addresses):
    """Asks for the sectors of the second-level cache that hold these addresses, each of which must exist. Only where a
    kernel is launched with PDL: no other device and no interpreter knows the instruction."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses], dtype=tl.int32, is_pure=False, pack=1)


def options(pdl: bool, **tuning: int) -> dict[str, Any]:
    """Keyword arguments of a launch: the compiler's options and, only where asked for, dependent launch.

    The interpreter and other vendors' compilers do not know `launch_pdl`, so it is absent unless it is wanted.
    """
    return {**tuning, "launch_pdl": True} if pdl else dict(tuning)


def compiles_for_nvidia(kernel: object) -> bool:
    """Whether a kernel may have NVIDIA's instructions, which no other compiler knows, nor the interpreter."""
    is_compiled = isinstance(kernel, triton.runtime.JITFunction)
    return is_compiled and triton.runtime.driver.active.get_current_target().backend == "cuda"


def warps_for(width: int) -> int:
    """Warps of a program that handles one row of ``width`` elements, about 16 elements a thread."""
    return max(1, min(16, triton.next_power_of_2(width) // 512))


def require_unit_stride(**tensors: torch.Tensor) -> None:
    """Raises ValueError for a tensor whose last dimension is not contiguous, which the kernels read in vectors."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: the last dimension has stride {tensor.stride(-1)}, needs 1; pass {name}.contiguous()"
            )
