"""One result of a benchmark, as kept under ``benchmarks/results`` and printed with ``--json``."""

from __future__ import annotations

import json
import platform
import subprocess
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click


@dataclass
class Measurement:
    engine: str
    model: str
    case: str
    """Like ``throughput_64x128+64``: kind, requests × input + output tokens."""
    device: str
    dtype: str
    n: int
    """Requests."""
    inp: int
    out: int
    seconds: float
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def out_tok_s(self) -> float:
        return self.n * self.out / self.seconds

    @property
    def total_tok_s(self) -> float:
        return self.n * (self.inp + self.out) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "model": self.model,
            "case": self.case,
            "device": self.device,
            "dtype": self.dtype,
            "n": self.n,
            "inp": self.inp,
            "out": self.out,
            "seconds": round(self.seconds, 4),
            "out_tok_s": round(self.out_tok_s, 1),
            "total_tok_s": round(self.total_tok_s, 1),
            **self.extra,
            **provenance(),
        }


def provenance() -> dict[str, str]:
    """Which code and which machine a figure comes from."""
    return {
        "version": version("inferplane"),
        "commit": commit_of(Path(__file__)),
        "machine": f"{processor_name()}, {platform.system()}",
    }


def processor_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def commit_of(file: Path) -> str:
    """The commit that a checkout's code is of, or ``unknown``.

    HEAD alone does not tell: a working tree may have been copied over an elder checkout, or have changes, and a package
    may be installed below a repository that is not its own.
    """
    try:
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        _git(file.parent, "diff", "--quiet", "HEAD")
        return _git(file.parent, "rev-parse", "--short", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(folder: Path, *arguments: str) -> str:
    """Raises `subprocess.CalledProcessError` where git answers no."""
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5, check=True
    )
    return done.stdout.strip()


def emit(measurement: Measurement, as_json: bool) -> None:
    """Prints a measurement: one JSON object, or a line for people."""
    if as_json:
        click.echo(json.dumps(measurement.as_dict()))
        return
    extra = "  ".join(f"{k} {v}" for k, v in measurement.extra.items())
    if not measurement.n:
        click.echo(f"{measurement.engine:13} {measurement.case:28} {measurement.seconds:8.3f} s {extra}")
        return
    click.echo(
        f"{measurement.engine:13} {measurement.case:28} {measurement.seconds:8.3f} s "
        f"{measurement.out_tok_s:9.1f} out tok/s {measurement.total_tok_s:9.1f} tok/s  {extra}"
    )
