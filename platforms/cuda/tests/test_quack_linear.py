"""Products of many rows by quack: which go there, and that they are right."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from inferplane.api import CapabilitySet, DeviceDescriptor
from inferplane.api.linear import LinearShape
from inferplane_cuda import cute_compiling, quack_library, quack_linear
from inferplane_cuda.launch import LAUNCH
from inferplane_cuda.quack_library import CACHE_DIR, Tiles
from inferplane_cuda.quack_linear import ROWS, QuackLinear, QuackMultiply
from inferplane_kernels_cuda import tuning_file
from inferplane_kernels_triton.tuning import TuningTable
from inferplane_torch_accelerator.dense_multiply import DenseMultiply

HALF = (torch.bfloat16, torch.float16)
TILES = {False: Tiles(256, 192), True: Tiles(128, 128, pingpong=1)}
FROM_ROWS = {False: 512, True: 256}


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cute_compiling, "_compiling", {})


def measured(kernel: str, shape: tuple[int, ...], default: Tiles, like: torch.Tensor) -> Tiles | None:
    """A table that lists any weight from some number of rows on."""
    is_gated = kernel == "quack_gated"
    return TILES[is_gated] if shape[0] >= FROM_ROWS[is_gated] else None


def in_float64(x: torch.Tensor, weight: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    y = x.double() @ weight.double().t()
    gate, up = y.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up if is_gated else y


def reason(dtype: torch.dtype = torch.bfloat16, *capabilities: str, **changes: object) -> str | None:
    shape = {
        "name": "w",
        "in_features": 64,
        "out_features": 128,
        "dtype": dtype,
        "has_bias": False,
        **changes,
    }
    device = DeviceDescriptor("acme", 0, "a GPU", 0, CapabilitySet(capabilities))
    return QuackLinear.unsupported_reason(LinearShape(**shape), device)  # type: ignore[arg-type]


def test_what_it_does_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    half, able = torch.float16, "warpgroup_matmul"
    monkeypatch.setattr(LAUNCH, "why_not", lambda: None)
    monkeypatch.setattr(quack_library, "missing_package", lambda: "quack-kernels")
    assert "not torch.float32" in str(reason(torch.float32, able))
    assert reason(half) == "a GPU lacks warpgroup_matmul, which quack's tiles here are for"
    assert "bias" in str(reason(half, able, has_bias=True))
    assert "not 60 and 128" in str(reason(half, able, in_features=60))
    assert "not 64 and 120" in str(reason(half, able, out_features=120))
    assert reason(half, able) == "the package quack-kernels is not installed"
    monkeypatch.setattr(quack_library, "missing_package", lambda: None)
    assert reason(half, able) is None
    monkeypatch.setattr(LAUNCH, "why_not", lambda: "no triton")
    assert reason(half, able) == "no triton"


@pytest.mark.parametrize("is_gated", [False, True])
def test_rows_go_where_they_were_measured_to_be_faster(
    is_gated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def multiply(
        x: torch.Tensor, transposed: torch.Tensor, out: torch.Tensor, tiles: Tiles, gated: bool
    ) -> None:
        calls.append((len(x), tiles, gated))
        out.copy_(in_float64(x, transposed.t(), is_gated=gated))

    monkeypatch.setattr(LAUNCH, "measured", measured)
    monkeypatch.setattr(quack_library, "_imported", lambda: multiply)
    weight = torch.randn(32, 16, dtype=torch.bfloat16)
    product = QuackMultiply(weight, None)
    cute_compiling.wait()
    assert calls == [(8, TILES[gated], gated) for gated in (False, True)]
    calls.clear()
    least = FROM_ROWS[is_gated] // 2 + 1
    for rows in (least, 1000, ROWS[-1] + 7):
        x = torch.randn(rows, 16, dtype=torch.bfloat16)
        y = product.silu_and_mul(x) if is_gated else product(x)
        torch.testing.assert_close(y.double(), in_float64(x, weight, is_gated=is_gated), rtol=1e-2, atol=1e-2)
    assert calls == [(rows, TILES[is_gated], is_gated) for rows in (least, 1000, ROWS[-1] + 7)]
    assert product._by_quack(torch.randn(least - 1, 16, dtype=torch.bfloat16), is_gated=is_gated) is None
    apart = torch.randn(1000, 20, dtype=torch.bfloat16)[:, :16]
    assert product._by_quack(apart, is_gated=is_gated) is None
    assert len(calls) == 3


def test_what_cannot_be_imported_leaves_products_to_the_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(CACHE_DIR, str(tmp_path))
    (tmp_path / "quack").mkdir()
    (tmp_path / "quack" / "__init__.py").write_text("raise OSError('libfoo.so is missing')")
    for module in [name for name in sys.modules if name.partition(".")[0] == "quack"]:
        monkeypatch.delitem(sys.modules, module)
    importlib.invalidate_caches()
    monkeypatch.setattr(LAUNCH, "measured", measured)
    quack_library._imported.cache_clear()
    try:
        weight, x = (torch.randn(rows, 16, dtype=torch.bfloat16) for rows in (32, 600))
        product = QuackMultiply(weight, None)
        assert torch.equal(product(x), DenseMultiply(weight, None, LAUNCH)(x))
        assert "OSError: libfoo.so is missing" in caplog.text and len(caplog.records) == 1
    finally:
        quack_library._imported.cache_clear()


def test_where_compiled_kernels_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_DIR, "elsewhere")
    quack_library._keep_on_disk()
    assert os.environ[CACHE_DIR] == "elsewhere"
    monkeypatch.delenv(CACHE_DIR)
    quack_library._keep_on_disk()
    folder = tmp_path / "inferplane" / "quack"
    assert os.environ[CACHE_DIR] == str(folder)
    assert folder.stat().st_mode & 0o77 == 0


def test_every_entry_of_the_shipped_table_fits() -> None:
    path = tuning_file((9, 0))
    assert path is not None
    table = TuningTable.read(path)
    for kernel in ("quack", "quack_gated"):
        for entry in json.loads(path.read_text())["kernels"].get(kernel, {}):
            shape = tuple(map(int, entry.split("x")))
            assert shape[0] in ROWS and table.measured(kernel, shape, Tiles()) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_against_float64(dtype: torch.dtype, is_gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if quack_library.missing_package() is not None or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs quack-kernels and a GPU of compute capability 9.0")
    monkeypatch.setattr(quack_linear, "tiles_by_rows", lambda weight, is_gated: {512: TILES[is_gated]})
    weight = torch.randn(1040, 328, device="cuda", dtype=dtype) / 16
    product = QuackMultiply(weight, None)
    for rows in (257, 300, 512):
        x = torch.randn(rows, 336, device="cuda", dtype=dtype)[:, :328]
        y = product._by_quack(x, is_gated=is_gated)
        assert y is not None and y.shape == (rows, 520 if is_gated else 1040)
        error = (y.double() - in_float64(x, weight, is_gated=is_gated)).norm()
        assert error < 4e-3 * in_float64(x, weight, is_gated=is_gated).norm()
