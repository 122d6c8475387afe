"""Shares of a run in processes of their own: where kernels are compiled as they are first used, the host is what a run
waits for, and it has several cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferplane_conformance.pytest_plugin import KitOptions


def run_shares(options: KitOptions, keyword: str) -> list[dict[str, Any]]:
    """The report of each share, as `Report.as_json` has it; what they print is printed when all are done.

    Raises RuntimeError for a process that ends without a report.
    """
    count = options.num_workers
    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)), **os.environ}
    reports = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = []
        for index in range(count):
            share = replace(
                options, report=folder / f"{index}.json", is_added=False, num_workers=1, share=(index, count)
            )
            with (folder / f"{index}.out").open("wb") as out:
                processes.append(
                    subprocess.Popen(_command(share, keyword), stdout=out, stderr=out, env=environment)
                )
        try:
            for process in processes:
                process.wait()
        finally:
            for process in processes:
                process.kill()
        for index in range(count):
            print((folder / f"{index}.out").read_text(errors="replace"), end="", flush=True)
            report = folder / f"{index}.json"
            if not report.exists():
                raise RuntimeError(f"worker {index} of {count} ended without a report")
            reports.append(json.loads(report.read_text(encoding="utf-8")))
    return reports


def _command(options: KitOptions, keyword: str) -> list[str]:
    settings = json.dumps({**asdict(options), "report": str(options.report)})
    return [sys.executable, "-m", "inferplane_conformance.workers", settings, keyword]


def main() -> None:
    """Of one worker: settings and keyword are its arguments."""
    from inferplane_conformance.pytest_plugin import KitOptions
    from inferplane_conformance.running import run

    settings = json.loads(sys.argv[1])
    settings["report"] = Path(settings["report"])
    for name in ("levels", "share"):
        settings[name] = tuple(settings[name])
    sys.exit(run(KitOptions(**settings), sys.argv[2]))


if __name__ == "__main__":
    main()
