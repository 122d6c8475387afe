"""Against tables of all numbers that a type has."""

from __future__ import annotations

import pytest
import torch

from inferplane.reference.kv_numbers import read, row_size, write


def through(x: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor | None) -> torch.Tensor:
    """What is read back of ``x: [num_tokens, num_kv_heads, head_dim]``, from scattered slots."""
    num_tokens, num_kv_heads, head_dim = x.shape
    cache = torch.empty(2 * num_tokens + 1, num_kv_heads, row_size(head_dim, dtype), dtype=dtype)
    slots = torch.arange(num_tokens) * 2 + 1
    write(x, cache, slots, scales)
    return read(cache.view(torch.uint8)[slots].view(dtype), scales)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16])
def test_fp8_is_the_nearest_number(dtype: torch.dtype, activations: torch.dtype) -> None:
    x = (torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(0)) * 3).to(activations)
    scales = torch.tensor([0.5, 0.037])
    x[0, 0, 0], x[1, 1, 1], x[2, 0, 2] = 1e9, -1e9, 0.0
    table = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    table = table[table.isfinite()].unique()
    numbers = x.double() / scales.double().view(1, 2, 1)
    distance = (numbers.unsqueeze(-1) - table).abs().amin(-1)
    found = through(x, dtype, scales).double() / scales.double().view(1, 2, 1)
    error = (found - numbers).abs()
    assert torch.allclose(error, distance, rtol=1e-5, atol=1e-6)
    assert found[0, 0, 0] == table.max() and found[1, 1, 1] == table.min() and found[2, 0, 2] == 0


def test_int8_has_a_scale_for_each_token_and_head() -> None:
    x = torch.randn(30, 3, 8, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-6, 6, 90).view(30, 3, 1)
    x[4, 1] = 0
    found = through(x, torch.int8, None)
    largest = x.abs().amax(-1, keepdim=True)
    assert ((found - x).abs() <= largest * (0.5 / 127 + 1e-6)).all()
    # the largest is exact but for the rounding of its scale
    at = x.abs().argmax(-1, keepdim=True)
    assert torch.allclose(found.gather(-1, at), x.gather(-1, at), rtol=1e-6)
    assert (found[4, 1] == 0).all()


def test_other_types_are_as_they_are() -> None:
    x = torch.randn(5, 2, 8, dtype=torch.bfloat16)
    assert torch.equal(through(x, torch.bfloat16, None), x)
