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
    assert vendor.failures("--only", "2", "-k", "silu or rms") == ["level_2_ops.py::test_op"]


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
