"""What every launch shares: tiles that fit a dimension, and programmatic dependent launch.

With programmatic dependent launch (`pdl=True`, NVIDIA from capability 9.0) a kernel's programs may start while the
kernel before it on the stream still runs. Each kernel here therefore calls `begin` before it touches what an earlier
kernel wrote, or writes what an earlier one may still read; what needs neither (loading weights) it does before.
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


def options(pdl: bool, **tuning: int) -> dict[str, Any]:
    """Keyword arguments of a launch: the compiler's options and, only where asked for, dependent launch.

    The interpreter and other vendors' compilers do not know `launch_pdl`, so it is absent unless it is wanted.
    """
    return {**tuning, "launch_pdl": True} if pdl else dict(tuning)


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


@triton.jit
def prefetch(ptr, row_bytes, ROWS: tl.constexpr, BYTES: tl.constexpr, THREADS: tl.constexpr):
    """Asks for the first BYTES of ROWS rows to be brought to the second-level cache (NVIDIA from capability 9.0).

    For what no earlier kernel writes, before `begin`: memory then works while the previous kernel finishes. BYTES comes
    from `prefetched_bytes`; each of the program's THREADS asks for one part.
    """
    parts: tl.constexpr = THREADS // ROWS
    part: tl.constexpr = BYTES // parts
    threads = tl.arange(0, THREADS)
    address = ptr.to(tl.int64) + (threads // parts).to(tl.int64) * row_bytes + threads % parts * part
    size = tl.full((THREADS,), part, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, size],
        tl.int32,
        False,
        1,
    )


def prefetched_bytes(weight: torch.Tensor, num_rows: int, wanted: int, rows: int, num_warps: int) -> int:
    """What `prefetch` may be asked for of each row, at most ``wanted``; 0 where rows and threads do not fit.

    A program has ``rows`` of the ``num_rows`` that are its grid's. The copy engine takes whole pieces of 16 bytes that
    are aligned to 16.
    """
    threads = 32 * num_warps
    row_bytes = weight.stride(0) * weight.element_size()
    if num_rows % rows or threads % rows or row_bytes % 16 or weight.data_ptr() % 16:
        return 0
    unit = 16 * threads // rows
    return min(wanted, weight.shape[1] * weight.element_size()) // unit * unit
