"""A process that compiles kernels of a library written in the CuTe DSL, which keeps them on disk for others.

    python -m inferplane_cuda.cute_process flash 0

reads tasks for that library and GPU, a line of JSON each, and answers each with a line: ``compiled``, or why not.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import torch

LIBRARIES = {"flash": "inferplane_cuda.flash_library", "quack": "inferplane_cuda.quack_library"}
"""Modules with a function ``compile_task``."""
COMPILED = "compiled"
COMMAND = (sys.executable, "-m", __name__)
TIMEOUT_S = 120.0
"""For one task, the imports before the first included."""


class CompilingProcess:
    """Started at once; whatever happens to it, its user compiles for itself."""

    def __init__(self, library: str, device: torch.device) -> None:
        command = [*COMMAND, library, str(device.index or 0)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )

    def compile(self, task: Mapping[str, Any]) -> bool:
        """Whether it did."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(task).encode() + b"\n")
            self._process.stdin.flush()
            can_read, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
            return bool(can_read) and self._process.stdout.readline().strip() == COMPILED.encode()
        except OSError:
            return False

    def close(self) -> None:
        """Ends it, which gives its memory of the GPU back."""
        self._process.kill()
        self._process.communicate()


def main() -> None:
    library, index = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library may print
    module = importlib.import_module(LIBRARIES[library])
    device = torch.device("cuda", int(index))
    torch.cuda.set_device(device)
    for line in sys.stdin:
        try:
            with torch.inference_mode():
                module.compile_task(json.loads(line), device)
            torch.cuda.synchronize()
            answer = COMPILED
        except Exception as error:
            answer = " ".join(f"{type(error).__name__}: {error}".split())
        print(answer, file=answers, flush=True)


if __name__ == "__main__":
    main()
