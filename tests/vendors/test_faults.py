"""A vendor that does one thing wrong is told so by the level that looks there."""

from __future__ import annotations

from pathlib import Path

import pytest

from vendors import Vendor


@pytest.fixture
def vendor(tmp_path: Path) -> Vendor:
    return Vendor.like_kestrel(tmp_path / "site", "faulty")


@pytest.mark.slow
def test_without_a_fault_there_is_none(vendor: Vendor):
    assert vendor.failures("--level", "2", "-k", "level_0 or level_1 or silu_and_mul") == []


def test_an_op_that_is_off_by_a_percent(vendor: Vendor):
    vendor.replace("ops.py", ".mul_(gate_up[..., dim:])", ".mul_(gate_up[..., dim:]) * 1.01")
    assert vendor.failures("--only", "2", "-k", "float32 and (silu or rms)") == ["level_2_ops.py::test_op"]


@pytest.mark.slow
def test_workers_find_what_one_process_finds(vendor: Vendor):
    vendor.replace("ops.py", ".mul_(gate_up[..., dim:])", ".mul_(gate_up[..., dim:]) * 1.01")
    arguments = ("--only", "1", "--only", "2", "-k", "silu or rms or signature", "--workers", "2")
    assert vendor.failures(*arguments) == ["level_2_ops.py::test_op"]


PRODUCTS = """
import torch
from torch.nn.functional import linear

from inferplane.api.linear import FusedMultiply, LinearKernel
from inferplane.api.ops import rms_norm, silu_and_mul
from inferplane.api.quant import QuantizedLinearKernel


class Product(FusedMultiply):
    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias

    def __call__(self, x):
        return linear(x, self.weight, self.bias)

    def silu_and_mul(self, x):
        return silu_and_mul(self(x))

    def after_add_rms_norm(self, x, residual, weight, eps, *, is_gated):
        total = x if residual is None else x + residual
        normed = rms_norm(total, weight, eps)
        return (self.silu_and_mul(normed) if is_gated else self(normed)), total


class OwnLinear(LinearKernel):
    name, priority = "own", 10

    @classmethod
    def unsupported_reason(cls, shape, device):
        return None

    @classmethod
    def prepare(cls, weight, bias):
        return Product(weight, bias)


class OwnQuantized(QuantizedLinearKernel):
    name, priority = "own_quantized", 10

    @classmethod
    def unsupported_reason(cls, shape, device):
        return None if shape.dtype == torch.float32 else "float32 only"

    @classmethod
    def prepare(cls, weight, bias):
        return Product(weight.dequantize(torch.float32), bias)
"""
OFFERED = """

@hookimpl
def linear_kernels(device):
    from inferplane_faulty.products import OwnLinear

    return (OwnLinear,)


@hookimpl
def quantized_linear_kernels(device):
    from inferplane_faulty.products import OwnQuantized

    return (OwnQuantized,)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "tests"),
    [
        ("", "", []),
        (
            "weight.dequantize(torch.float32)",
            "weight.dequantize(torch.float32) * 1.01",
            ["level_3_quantized.py::test_quantized_linear"],
        ),
        ("self(normed)), total", "self(normed)), x", ["level_3_linear.py::test_norm_and_gate_taken_along"]),
        (
            "rms_norm(total, weight, eps)",
            "rms_norm(total, weight, eps) * 1.01",
            ["level_3_linear.py::test_norm_and_gate_taken_along"],
        ),
    ],
    ids=[
        "none",
        "a scale that is off by a percent",
        "a sum that is not passed on",
        "a norm that is off by a percent",
    ],
)
def test_products_of_its_own(vendor: Vendor, right: str, wrong: str, tests: list[str]):
    (vendor.package / "products.py").write_text(PRODUCTS.replace(right, wrong), encoding="utf-8")
    vendor.append("plugin.py", OFFERED)
    assert vendor.failures("--only", "3", "--quick", "-k", "linear") == tests


@pytest.mark.slow
def test_a_missing_op_runs_on_its_reference(vendor: Vendor):
    vendor.replace("ops.py", '    OpImpl("rms_norm", rms_norm, PROVIDER),\n', "")
    assert vendor.failures("--only", "2", "--only", "4", "-k", "rms_norm or greedy") == []


@pytest.mark.slow
def test_a_kv_cache_that_is_written_beside_the_slot(vendor: Vendor):
    """The next slot of the block is overwritten: right at once, wrong when the cache is read again."""
    vendor.replace(
        "attention.py",
        "    kv[blocks, 1, :, offsets] = v\n",
        "    kv[blocks, 1, :, (offsets + 1) % block_size] = v\n    kv[blocks, 1, :, offsets] = v\n",
    )
    assert vendor.failures("--only", "3", "-k", "float32-grouped") == ["level_3_attention.py::test_attention"]


@pytest.mark.slow
def test_a_runtime_that_keeps_what_it_copied(vendor: Vendor):
    vendor.append(
        "runtime.py",
        "\n    def to_device(self, host):\n"
        "        copies = self.__dict__.setdefault('copies', [])\n"
        "        copies.append(super().to_device(host))\n"
        "        return copies[-1]\n",
    )
    assert vendor.failures("--only", "3", "-k", "runtime") == [
        "level_3_runtime.py::test_copies_leave_no_memory_behind"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "level", "test"),
    [
        (
            "\nimport inferplane.api.ops\ninferplane.api.ops.DEFAULT_TOLERANCES = {}\n",
            "0",
            "level_0_packaging.py::test_the_source_changes_nobody_elses_modules",
        ),
        (
            "\nexec('import inferplane.api.ops as o; o.DEFAULT_TOLERANCES = {}')\n",
            "1",
            "level_1_contract.py::test_loading_the_plugin_leaves_the_core_as_it_was",
        ),
        (
            "\nfrom inferplane.request import SamplingParams\n",
            "0",
            "level_0_packaging.py::test_the_source_imports_the_contract_and_nothing_else_of_the_core",
        ),
        (
            "\nimport torch\n",
            "0",
            "level_0_packaging.py::test_the_entry_point_imports_on_a_bare_host",
        ),
    ],
    ids=["monkeypatch", "hidden monkeypatch", "private import", "heavy import"],
)
def test_source_that_breaks_the_rules(vendor: Vendor, fault: str, level: str, test: str):
    file = "plugin.py" if "torch" in fault else "ops.py"
    vendor.append(file, fault)
    assert test in vendor.failures("--only", level)


@pytest.mark.slow
def test_an_api_that_this_core_does_not_serve(vendor: Vendor):
    vendor.replace("plugin.py", "api=(2, 0)", "api=(9, 0)")
    done = vendor.inferplane("conform", "--device", "faulty", "--level", "0")
    assert done.returncode == 1
    assert "plugin API 9.0" in done.stderr
    assert "pip install --upgrade inferplane" in done.stderr
