"""`benchmarks/quantization.py`: which perplexities it takes for too far from the plain model's, and that it says so."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from repository import ROOT


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quantization", ROOT / "benchmarks/quantization.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(percent: float) -> dict[str, float]:
    """What `compare` returns of a form that is so far from one of perplexity 20."""
    return {"perplexity": 20 * (1 + percent / 100), "percent": percent, "standard_error": 0.1}


def test_a_distance_has_the_error_of_the_differences_of_tokens(benchmark: ModuleType) -> None:
    """That of the tokens themselves, which are far from one another, has no part in it."""
    base, form = [-1.0, -2.0, -6.0, -3.0], [-1.1, -2.1, -6.3, -2.9]
    found = benchmark.compare(form, base)
    assert found["perplexity"] == pytest.approx(math.exp(3.1))
    assert found["percent"] == pytest.approx(100 * (math.exp(0.1) - 1))
    deviation = math.sqrt((0.2**2 + 0.2**2) / 3)  # of 0.1, 0.1, 0.3 and -0.1
    assert found["standard_error"] == pytest.approx(100 * math.exp(0.1) * deviation / 2)
    same = benchmark.compare(base, base)
    assert (same["perplexity"], same["percent"], same["standard_error"]) == (math.exp(3), 0, 0)


def test_windows_are_scored_token_by_token_but_for_their_first(
    benchmark: ModuleType, tiny_model: Callable[[str], Path]
) -> None:
    """Against the same tokens in windows of their own: what stands before a window has no part in it."""
    windows = [[*range(3, 11)], [*range(20, 28)], [40, 41]]
    settings = {"dtype": "float32", "device": "reference", "kv_cache_bytes": 1 << 20}
    found = benchmark.log_probabilities(str(tiny_model("llama")), windows, **settings)
    assert len(found) == 7 + 7 + 1 and all(value < 0 for value in found)
    alone = [
        value
        for ids in windows
        for value in benchmark.log_probabilities(str(tiny_model("llama")), [ids], **settings)
    ]
    assert found == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize("form", ["int8", "w4-64-gptq", "kv-fp8_e4m3", "some/folder/Q4_K_M.gguf"])
def test_a_form_may_be_as_far_off_as_is_allowed(benchmark: ModuleType, form: str) -> None:
    allowed = benchmark.ALLOWED[Path(form).name]
    for sign in (1, -1):  # and two standard errors of 0.1 more
        assert benchmark.print_table({"bf16": row(0), form: row(sign * (allowed + 0.19))}) == []
        assert benchmark.print_table({"bf16": row(0), form: row(sign * (allowed + 0.21))}) == [form]


def test_a_form_without_a_bound_may_be_anything_but_no_number(benchmark: ModuleType) -> None:
    assert benchmark.print_table({"bf16": row(0), "other.gguf": row(350)}) == []
    found = {"bf16": row(0), "int8": row(math.nan), "fp8": row(0.5), "other.gguf": row(math.nan)}
    assert benchmark.print_table(found) == ["int8", "other.gguf"]


def test_nothing_is_near_a_plain_model_of_no_number(benchmark: ModuleType) -> None:
    base, found = [math.nan, -1.0], [-2.0, -1.0]
    rows = {"bf16": benchmark.compare(base, base), "int8": benchmark.compare(found, base)}
    assert benchmark.print_table(rows) == ["bf16", "int8"]


def test_a_run_with_a_form_too_far_off_fails_and_names_it(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two files of one name are two forms."""
    measured = {"bf16": 20.0, "a/Q8_0.gguf": 21.0, "b/Q8_0.gguf": 20.1, "int8": 19.0}

    def measure(
        form: str, folder: Path, windows: list[list[int]], options: argparse.Namespace
    ) -> list[float]:
        assert [len(ids) for ids in windows] == [6, 6, 4]
        return [-math.log(measured[form])] * 13

    monkeypatch.setattr(benchmark, "measure", measure)
    out = tmp_path / "out.jsonl"
    command = ["quantization.py", str(tiny_model("llama")), "--max-tokens", "16", "--window", "6"]
    monkeypatch.setattr("sys.argv", [*command, *measured, "--json", str(out)])
    with pytest.raises(SystemExit, match=r"^further from bf16 than allowed: a/Q8_0.gguf, int8$"):
        benchmark.main()
    assert "| a/Q8_0.gguf | 21.000 | +5.00 % | 0.00 % | ± 1.0 % |" in capsys.readouterr().out
    rows = list(map(json.loads, out.read_text().splitlines()))
    assert [row["perplexity"] for row in rows] == pytest.approx(list(measured.values()))
    assert [row["tokens"] for row in rows] == [13] * 4

    monkeypatch.setattr("sys.argv", [*command, "bf16", "b/Q8_0.gguf"])
    benchmark.main()


def test_the_page_states_the_bounds(benchmark: ModuleType) -> None:
    forms = [
        *("bf16", "int8", "fp8", "w4-64", "w4-64-gptq", "nf4", "Q4_K_M.gguf", "w-mxfp4", "w-mxfp4-gptq"),
        *benchmark.KV,
    ]
    page = (ROOT / "docs/quantization.md").read_text(encoding="utf-8")
    table = page.partition("| allowed |\n")[2].partition("\n\n")[0].splitlines()[1:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    assert [cell[4] for cell in cells] == [
        f"± {benchmark.ALLOWED[form]:g} %" if form in benchmark.ALLOWED else "" for form in forms
    ]
    for cell, form in zip(cells[1:], forms[1:]):
        distance, error = (float(cell[column].removesuffix(" %")) for column in (2, 3))
        assert abs(distance) - 2 * error <= benchmark.ALLOWED[form]
