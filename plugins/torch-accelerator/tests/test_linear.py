"""Products and what is fused with them, against the ops in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from inferplane.api import DeviceDescriptor
from inferplane.api.linear import LinearShape
from inferplane.api.ops import add_rms_norm, rms_norm, silu_and_mul
from inferplane_torch_accelerator import dense_multiply
from inferplane_torch_accelerator.dense_multiply import DenseMultiply
from inferplane_torch_accelerator.launch import Launch
from inferplane_torch_accelerator.linear import DenseLinear

TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 3e-2}
IN, OUT = 96, 80


class AcmeLinear(DenseLinear):
    """As a platform names it."""

    name = "acme_dense"
    launch = Launch("nvidia")


def drawn(device: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(device, dtype)


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype
    error = (got.double() - want).norm() / want.norm()
    assert error < TOLERANCES[dtype], error


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_products(dtype: torch.dtype, num_rows: int, has_bias: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    weight = drawn(device, dtype, OUT, IN)
    bias = drawn(device, dtype, OUT) if has_bias else None
    multiply = AcmeLinear.prepare(weight, bias)
    assert isinstance(multiply, DenseMultiply)
    x, residual = drawn(device, dtype, num_rows, IN), drawn(device, dtype, num_rows, IN)
    norm = drawn(device, dtype, IN)
    wide_bias = None if bias is None else bias.double()

    def product(y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(y, weight.double(), wide_bias)

    total = x + residual
    after_sum = product(add_rms_norm(x.double(), residual.double(), norm.double(), 1e-5)[0])
    after_norm = product(rms_norm(x.double(), norm.double(), 1e-5))
    assert_near(multiply(x), product(x.double()), dtype)
    assert_near(multiply.silu_and_mul(x), silu_and_mul(product(x.double())), dtype)
    for is_gated in (False, True):
        got, found = multiply.after_add_rms_norm(x.clone(), residual.clone(), norm, 1e-5, is_gated=is_gated)
        assert_near(got, silu_and_mul(after_sum) if is_gated else after_sum, dtype)
        assert_near(found, total.double(), dtype)  # the interpreter rounds bfloat16 to zero
        got, found = multiply.after_add_rms_norm(x.clone(), None, norm, 1e-5, is_gated=is_gated)
        assert_near(got, silu_and_mul(after_norm) if is_gated else after_norm, dtype)
        assert torch.equal(found, x)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5])
def test_what_was_measured_is_what_multiplies(
    num_rows: int,
    has_bias: bool,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Two rows have an entry (for the gate none: then silu is apart), so do three, rounded up to four, and five have
    none, and go in parts."""
    shape, tile = f"{OUT}x{IN}", {"rows": 16, "columns": 32}
    table = {
        "matvec": {shape: {"rows": 2, "columns": 64}},
        "skinny_matmul": {
            f"2x{shape}": tile,
            f"4x{shape}": {**tile, "splits": 2},
            f"4x{OUT}x1": tile,
        },
        "skinny_matmul_gated": {f"4x{shape}": {**tile, "splits": 2}},
        "many_rows": {shape: {"row_parts": 2, "column_parts": 2}},
    }
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"kernels": table}))
    launch = Launch("nvidia", tuning_file=lambda device: path)
    monkeypatch.setattr(dense_multiply, "MANY_ROWS", 1)
    calls: list[str] = []

    def noting(name: str) -> Callable[..., object]:
        kernel = getattr(dense_multiply, name)

        def call(*args: object, **options: object) -> object:
            calls.append(name)
            return kernel(*args, **options)

        return call

    for name in ("matvec", "skinny_matmul", "multiply_in_parts"):
        monkeypatch.setattr(dense_multiply, name, noting(name))
    torch.manual_seed(0)
    dtype = torch.float16
    weight, bias = drawn(device, dtype, OUT, IN), drawn(device, dtype, OUT)
    multiply = DenseMultiply(weight, bias if has_bias else None, launch)
    x = drawn(device, dtype, num_rows, IN)
    want = torch.nn.functional.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert_near(multiply(x), want, dtype)
    assert_near(multiply.silu_and_mul(x), silu_and_mul(want), dtype)
    expected = {
        1: ["matvec", "matvec"],
        2: ["skinny_matmul", "skinny_matmul"],
        3: ["skinny_matmul", "skinny_matmul"],
        5: ["multiply_in_parts", "multiply_in_parts"],
    }
    assert calls == expected[num_rows]
    assert_near(multiply(x.T.contiguous().T), want, dtype)  # columns, as a mixer over time leaves them


@pytest.mark.parametrize("parts", [None, {"row_parts": 2, "column_parts": 2}], ids=["whole", "parts"])
def test_the_library_adds_products_of_many_rows(
    parts: dict[str, int] | None, device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"kernels": {"many_rows": {f"{OUT}x{IN}": parts}} if parts else {}}))
    launch = Launch("nvidia", tuning_file=lambda device: path)
    monkeypatch.setattr(dense_multiply, "MANY_ROWS", 5)
    torch.manual_seed(0)
    dtype = torch.float16
    weight, bias = drawn(device, dtype, OUT, IN), drawn(device, dtype, OUT)
    x, residual = drawn(device, dtype, 7, IN), drawn(device, dtype, 7, OUT)
    given = residual.clone()
    total = DenseMultiply(weight, None, launch).added_to(given, x)
    assert total is not None
    assert_near(total, residual.double() + x.double() @ weight.double().T, dtype)
    given = residual.clone()
    assert DenseMultiply(weight, None, launch).added_to(given[:4], x[:4]) is None
    assert DenseMultiply(weight, bias, launch).added_to(given, x) is None
    assert torch.equal(given, residual)


def test_what_it_multiplies() -> None:
    device = DeviceDescriptor("acme", 0, "", 0)
    assert AcmeLinear.unsupported_reason(LinearShape("w", IN, OUT, torch.bfloat16, False), device) is None
    reason = AcmeLinear.unsupported_reason(LinearShape("w", IN, OUT, torch.float64, False), device)
    assert reason is not None and "not torch.float64" in reason
