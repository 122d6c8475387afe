"""Where the kernels run in these tests: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from triton_device import HAS_GPU


@pytest.fixture
def device() -> torch.device:
    """Where a test puts its tensors."""
    return torch.device("cuda" if HAS_GPU else "cpu")
