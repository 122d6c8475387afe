"""Where the kernels run in these tests: on the GPU if there is one, else in Triton's interpreter.

Triton reads the choice when it is first imported, so it is made here, before any test module imports a kernel.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        pytest.exit(
            "triton was imported before TRITON_INTERPRET=1 was set; run these tests in a process of their own"
        )
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


@pytest.fixture
def device() -> torch.device:
    """Where a test puts its tensors."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
