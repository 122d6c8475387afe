"""Fixtures for tests of Triton kernels: on an accelerator if there is one, else on the host in Triton's interpreter.

Triton reads the choice when kernels are first imported, so it is made here, for a ``conftest.py`` to import.
"""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The host, and a GPU where there is one."""
    has_gpu = torch.cuda.is_available()
    if request.param == "cuda" and not has_gpu:
        pytest.skip("no GPU on this machine")
    if request.param == "cpu" and has_gpu:
        pytest.skip("kernels are compiled for the GPU here, not interpreted")
    return torch.device(request.param)


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU on this machine")
    return torch.device("cuda")
