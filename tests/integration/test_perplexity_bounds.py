"""`benchmarks/quantization.py`: which perplexities it takes for too far from the plain model's, and that it says so."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from repository import ROOT


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantization", ROOT / "benchmarks/quantization.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("form", ["int8", "w4-64-gptq", "kv-fp8_e4m3", "some/folder/Q4_K_M.gguf"])
def test_a_form_may_be_as_far_off_as_is_allowed(benchmark: ModuleType, form: str) -> None:
    share = benchmark.ALLOWED[Path(form).name] / 100
    for sign in (1, -1):
        assert benchmark.print_table({"bf16": 20.0, form: 20 * (1 + 0.99 * sign * share)}) == []
        assert benchmark.print_table({"bf16": 20.0, form: 20 * (1 + 1.01 * sign * share)}) == [form]


def test_a_form_without_a_bound_may_be_anything_but_no_number(benchmark: ModuleType) -> None:
    assert benchmark.print_table({"bf16": 20.0, "other.gguf": 90.0}) == []
    found = {"bf16": 20.0, "int8": math.nan, "fp8": 20.1, "other.gguf": math.nan}
    assert benchmark.print_table(found) == ["int8", "other.gguf"]


def test_nothing_is_near_a_plain_model_of_no_number(benchmark: ModuleType) -> None:
    assert benchmark.print_table({"bf16": math.nan, "int8": 20.0}) == ["bf16", "int8"]


def test_a_run_with_a_form_too_far_off_fails_and_names_it(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two files of one name are two forms."""
    measured = {"bf16": 20.0, "a/Q8_0.gguf": 21.0, "b/Q8_0.gguf": 20.1, "int8": 19.0}

    def measure(form: str, folder: Path, text: str, options: argparse.Namespace) -> dict[str, Any]:
        return {"case": form, "perplexity": measured[form]}

    monkeypatch.setattr(benchmark, "measure", measure)
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr("sys.argv", ["quantization.py", "folder", *measured, "--json", str(out)])
    with pytest.raises(SystemExit, match=r"^further from bf16 than allowed: a/Q8_0.gguf, int8$"):
        benchmark.main()
    assert "| a/Q8_0.gguf | 21.000 | +5.00 % | ± 1.0 % |" in capsys.readouterr().out
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert [row["perplexity"] for row in rows] == list(measured.values())

    monkeypatch.setattr("sys.argv", ["quantization.py", "folder", "bf16", "b/Q8_0.gguf"])
    benchmark.main()


def test_the_page_states_the_bounds(benchmark: ModuleType) -> None:
    forms = [
        *("bf16", "int8", "fp8", "w4-64", "w4-64-gptq", "nf4", "Q4_K_M.gguf", "w-mxfp4", "w-mxfp4-gptq"),
        *benchmark.KV,
    ]
    page = (ROOT / "docs/quantization.md").read_text(encoding="utf-8")
    table = page.partition("| allowed |\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert [cell[3] for cell in cells] == [
        f"± {benchmark.ALLOWED[form]:g} %" if form in benchmark.ALLOWED else "" for form in forms
    ]
    for cell, form in zip(cells[1:], forms[1:]):
        assert abs(float(cell[2].removesuffix(" %"))) <= benchmark.ALLOWED[form]
