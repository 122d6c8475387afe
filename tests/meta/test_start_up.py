"""`inferplane --help` answers at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

HELP = [sys.executable, "-c", "from inferplane.cli.main import main; main()", "--help"]
# A run that shares its cores with others says little about wall time; processor time is nearly free of that.
MAX_PROCESSOR_S = 0.4


def seconds_of_help() -> float:
    before = os.times()
    done = subprocess.run(HELP, capture_output=True, text=True, timeout=30)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_help_takes_little_processor_time():
    assert min(seconds_of_help() for _ in range(5)) <= MAX_PROCESSOR_S


@pytest.mark.slow
def test_help_takes_little_time():
    def wall_s() -> float:
        start = time.perf_counter()
        seconds_of_help()
        return time.perf_counter() - start

    assert min(wall_s() for _ in range(5)) <= 0.4


def test_help_imports_neither_torch_nor_a_web_framework():
    script = (
        "import sys\n"
        "from inferplane.cli.main import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "print('LOADED', sorted({'torch', 'transformers', 'numpy', 'fastapi', 'aiohttp'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"
