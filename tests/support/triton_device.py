"""Fixtures for tests of Triton kernels: on an accelerator if there is one, else on the host in Triton's interpreter.

Triton reads the choice when kernels are first imported, so it is made here, for a ``conftest.py`` to import.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    if "triton" in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        pytest.exit(
            "triton was imported before it was set to interpret; run these tests in a process of their own"
        )
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The host, and a GPU where there is one."""
    if request.param == "cuda" and not HAS_GPU:
        pytest.skip("no GPU on this machine")
    if request.param == "cpu" and HAS_GPU:
        pytest.skip("kernels are compiled for the GPU here, not interpreted")
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    if not HAS_GPU:
        pytest.skip("no GPU on this machine")
    return torch.device("cuda")
