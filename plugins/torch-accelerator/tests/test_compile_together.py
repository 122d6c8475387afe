"""Kernels noted and compiled side by side, by Triton's compiler for a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json
import threading
import torch
from triton import knobs
from inferplane_kernels_triton import norm, skinny_matmul
from inferplane_kernels_triton.compile_only import compile_only, parse_target
from inferplane_torch_accelerator.compile_together import compile_together

compiled = []

def listener(*, src, cache_hit, **_):
    is_beside = threading.current_thread() is not threading.main_thread()
    compiled.append((src.fn.__name__, is_beside))

def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")

def step(size):
    def run():
        x = norm.rms_norm(meta(size, 64), meta(64), 1e-5)
        skinny_matmul.skinny_matmul(x, meta(128, 64))
    return run

def fails():
    raise RuntimeError("no such step")

knobs.compilation.listener = listener
runs = [step(size) for size in (40, 20, 17, 9)]
with compile_only(parse_target("cuda:90")) as launched:
    compile_together([*runs, fails, step(64)], torch.device("cpu"))
    before = sorted(compiled)
    for run in runs:
        run()
    print(json.dumps({"before": before, "after": sorted(compiled)}))
    assert knobs.runtime.jit_cache_hook is None
"""


def test_each_is_compiled_once_and_before_it_is_needed(tmp_path: Path) -> None:
    """The products of 40, of 20 and 17, and of 9 rows are three kernels; what a run that fails hides comes later."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = ["_rms_norm", "_skinny_matmul", "_skinny_matmul", "_skinny_matmul"]
    assert found["before"] == [[name, True] for name in names]  # in threads
    assert found["after"] == found["before"]


def test_without_triton_there_is_nothing_to_compile() -> None:
    script = """
import sys
sys.modules["triton"] = None
import torch
from inferplane_torch_accelerator.compile_together import compile_together
compile_together([lambda: 1 / 0], torch.device("cpu"))
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
