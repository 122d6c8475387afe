"""How far a product of packed weights may be off."""

from __future__ import annotations

import torch

from inferplane_conformance.quantized_cases import declared_rounding


def test_only_a_kernel_that_says_so_may_round_float32_activations() -> None:
    assert declared_rounding(torch.float32, None) == 1e-5
    assert declared_rounding(torch.float32, 16) == 2.0**-13
    assert declared_rounding(torch.float32, 24) == 1e-5
    assert declared_rounding(torch.bfloat16, 16) == declared_rounding(torch.bfloat16, None) == 2.0**-7
