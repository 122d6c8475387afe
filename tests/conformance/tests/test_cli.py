"""The command as a user runs it: its status, its report and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from inferplane.api.ops import OPS
from inferplane.config.engine import DTYPES
from inferplane_conformance import op_modes
from inferplane_conformance.subject import Subject


def conform(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "inferplane.cli.main", "conform", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=170, env={**os.environ, **environment}
    )


def test_a_report_and_its_page(tmp_path: Path):
    report = tmp_path / "reports" / "reference.json"
    done = conform(
        "--device",
        "reference",
        "--only",
        "1",
        "--only",
        "2",
        "-k",
        "rms_norm or whole",
        "--report",
        str(report),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(report.read_text())
    assert content["passed"]
    assert content["subject"]["platform"] == "reference"
    assert content["levels"].keys() == {"1", "2"}
    assert content["levels"]["2"]["passed"] >= 12
    assert content["levels"]["2"]["failed"] == 0
    names = {result["test"] for result in content["results"]}
    assert "level_2_ops.py::test_op[float32-rms_norm-whole]" in names
    page = report.with_suffix(".html").read_text()
    assert "level_2_ops.py::test_op[float32-rms_norm-whole]" in page
    *_, level, verdict = done.stdout.splitlines()
    assert level.startswith("level 2 ops: ")
    assert verdict.startswith("conformance of reference:0 ") and ": passed in " in verdict


def test_workers_share_a_run(tmp_path: Path):
    report = tmp_path / "shared.json"
    arguments = ("--only", "1", "--only", "2", "-k", "rms_norm or signature", "--report", str(report))
    done = conform("--device", "reference", *arguments, "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(report.read_text())
    tests = [result["test"] for result in content["results"]]
    of_ops = {
        f"{dtype}-{op}-{layout}"
        for dtype in DTYPES
        if dtype != "float64"
        for op in ("rms_norm", "add_rms_norm")
        for layout in ("whole", "strided")
    }
    assert {test.partition("[")[2].rstrip("]") for test in tests if "level_2" in test} == of_ops
    assert len(tests) == len(set(tests)) == len(of_ops) + 1
    assert content["passed"] and content["levels"]["2"]["passed"] == len(of_ops)
    assert done.stdout.splitlines()[-1].startswith("conformance of reference:0 ")
    assert done.stdout.count("conformance of ") == 1


def test_a_limit_of_time_leaves_a_report_of_what_ran(tmp_path: Path):
    report = tmp_path / "part.json"
    done = conform("--device", "reference", "--only", "2", "--limit", "0", "--report", str(report))
    assert done.returncode != 0
    content = json.loads(report.read_text())
    assert not content["passed"]
    assert len(content["results"]) == 1
    assert content["levels"]["2"]["not_run"] > 10
    assert "the limit of 0 s is over" in done.stdout


@pytest.mark.parametrize("device", ["nobody", "cpu:99"])
def test_a_device_that_is_not_there_is_named(device: str):
    done = conform("--device", device)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert device.partition(":")[0] in done.stderr


def test_who_serves_each_op(tmp_path: Path):
    report = tmp_path / "support.json"
    done = conform("--device", "cpu", "--mode", "support", "--report", str(report))
    assert done.returncode == 0, done.stderr
    rows = json.loads(report.read_text())
    assert {(row["op"], row["dtype"]) for row in rows} == {(op, dtype) for op in OPS for dtype in DTYPES}
    assert all(row["provider"] for row in rows)
    assert done.stdout.splitlines()[0].split() == ["OP", "DTYPE", "PROVIDER", "REJECTED"]


def test_how_long_a_call_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(op_modes, "ROUND_S", 0.001)
    subject = Subject("cpu")
    rows = list(op_modes.perf_rows(subject))
    own = [row for row in rows if row["provider"] != "reference"]
    assert own
    assert {row["op"] for row in rows} == OPS.keys()
    assert all(row["us"] > 0 and row["reference_us"] > 0 for row in rows)


def test_modes_other_than_test_need_the_device():
    done = conform("--device", "kestrel", "--mode", "perf", KESTREL_NUM_CARDS="0")
    assert done.returncode == 1
    assert "there is no device: KESTREL_NUM_CARDS is 0" in done.stderr
