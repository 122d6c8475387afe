"""``python -m inferplane_kernels_triton.compile hip:gfx942 cuda:90``: compiles every kernel without a GPU.

Prints one line for each kernel with its registers, spills and shared memory, and exits with 1 if one does not compile.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from triton.backends.compiler import GPUTarget

from inferplane_kernels_triton.compile_cases import CASES, CUDA_CASES, FP8_CASES, cases_for
from inferplane_kernels_triton.compile_only import compile_only, parse_target
from inferplane_kernels_triton.tuning import TuningTable


def compile_case(name: str, target: GPUTarget, tuning: TuningTable) -> str | None:
    """Prints what was compiled; returns the error of a case that does not compile."""
    begin = time.monotonic()
    with compile_only(target) as compiled:
        try:
            (CASES | CUDA_CASES | FP8_CASES)[name](tuning)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            for kernel in compiled:
                print(
                    f"{target.backend}:{target.arch} {name} {kernel.name} registers={kernel.registers} "
                    f"spills={kernel.spills} shared={kernel.shared_bytes}"
                )
    print(f"{target.backend}:{target.arch} {name} compiled in {time.monotonic() - begin:.1f} s", flush=True)
    return None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m inferplane_kernels_triton.compile", description=__doc__)
    parser.add_argument(
        "targets", nargs="+", type=parse_target, metavar="TARGET", help="hip:gfx942, cuda:90, …"
    )
    parser.add_argument(
        "--case", action="append", choices=CASES | CUDA_CASES | FP8_CASES, help="only these; all by default"
    )
    parser.add_argument("--tuning", type=Path, help="a tuning table for these targets")
    chosen = parser.parse_args(arguments)
    tuning = TuningTable.read(chosen.tuning) if chosen.tuning else TuningTable({})
    failed = 0
    for target in chosen.targets:
        for name in chosen.case or cases_for(target):
            if error := compile_case(name, target, tuning):
                print(f"{target.backend}:{target.arch} {name} FAILED {error}", flush=True)
                failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
