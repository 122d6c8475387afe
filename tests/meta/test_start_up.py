"""`inferplane --help` answers at once."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time

import pytest

HELP = ["-c", "from inferplane.cli.main import main; main()", "--help"]
# What any command line of this kind imports. How long that takes says how fast the machine is.
YARDSTICK = ["-c", "import click, importlib.metadata, inspect, logging, zipfile"]
MAX_YARDSTICKS = 2.5


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """With bytecode kept, as on a user's machine: compiling our source on each start is not to be timed."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(tmp_path_factory.mktemp("bytecode"))}


def run(arguments: list[str], environment: dict[str, str]) -> tuple[float, str]:
    """Processor seconds, because wall time says little where cores are shared, and what was printed."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def test_help_takes_little_processor_time(environment):
    # In turn, so that both meet the machine's slow moments.
    runs = [(run(HELP, environment), run(YARDSTICK, environment)) for _ in range(6)][1:]
    assert all("serve" in printed for (_, printed), _ in runs)
    help_s = min(seconds for (seconds, _), _ in runs)
    yardstick_s = min(seconds for _, (seconds, _) in runs)
    assert help_s <= MAX_YARDSTICKS * yardstick_s


@pytest.mark.slow
def test_help_takes_little_time(environment):
    def wall_s() -> float:
        start = time.perf_counter()
        _, printed = run(HELP, environment)
        seconds = time.perf_counter() - start
        assert "serve" in printed
        return seconds

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
