"""The command as a user runs it: its status, its report and its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


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
    assert "level 2 ops: " in done.stdout


@pytest.mark.parametrize("device", ["nobody", "cpu:99"])
def test_a_device_that_is_not_there_is_named(device: str):
    done = conform("--device", device)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert device.partition(":")[0] in done.stderr
