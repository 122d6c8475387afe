"""The driver's stage that loads a server, on a tiny shape: what it starts, measures and ends."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from repository import ROOT


@pytest.mark.slow
def test_a_server_is_started_loaded_and_ended(tmp_path):
    command = [
        *(sys.executable, str(ROOT / "benchmarks/h200/driver.py"), "serve", "--model", "tiny", "--device", "cpu"),
        *("--load", "--num-requests 12 --concurrency 6 --input-len 32 --output-len 8", "--out", str(tmp_path)),
        *("--engine", "--kv-cache-bytes 16MiB --max-model-len 512"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    ready, load = map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())
    assert (ready["case"], load["case"]) == ("ready", "serve_c6_12x32+8")
    assert (load["n"], load["inp"], load["out"], load["errors"]) == (12, 32, 8, 0)
