"""Examines plugins, each in a process of its own, so that one that hangs or crashes is a line of the report.

Imports neither torch nor a plugin.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from inferplane.api.diagnosis import Diagnostic, Health
from inferplane.plugins.discovery import installed_names
from inferplane.plugins.record import PluginError

TIMEOUT_S = 60.0
"""For one plugin: importing torch on a cold machine takes some 20 s of it."""
LIBRARIES = ("torch", "transformers")

Finding = tuple[str, Diagnostic]
"""(the plugin or ``inferplane``, what was found)."""


def examine(names: Sequence[str] = (), timeout_s: float = TIMEOUT_S) -> Iterator[Finding]:
    """Findings as they come; of every installed plugin where none is named.

    Raises `PluginError` for a name that is not installed.
    """
    installed = installed_names()
    if unknown := [name for name in names if name not in installed]:
        raise PluginError(f"no plugin {unknown[0]!r} is installed; there are: {', '.join(installed)}")
    yield from (("inferplane", found) for found in check_installation())
    for name in names or installed:
        yield from ((name, found) for found in examine_plugin(name, timeout_s))


def check_installation() -> Iterator[Diagnostic]:
    """The core and the libraries that it needs."""
    from packaging.requirements import Requirement

    python = sys.version.split()[0]
    yield Diagnostic("core", Health.OK, f"inferplane {version('inferplane')}, Python {python}")
    needed = {each.name: each for each in map(Requirement, requires("inferplane") or [])}
    for library in LIBRARIES:
        wanted = needed[library].specifier
        try:
            there = version(library)
        except PackageNotFoundError:
            yield Diagnostic(library, Health.FAULT, "not installed", f'pip install "{library}{wanted}"')
            continue
        if wanted.contains(there, prereleases=True):
            yield Diagnostic(library, Health.OK, f"{there}, as {wanted} asks")
        else:
            mend = f'pip install "{library}{wanted}"'
            yield Diagnostic(library, Health.FAULT, f"{there}, but {wanted} is needed", mend)


def examine_plugin(name: str, timeout_s: float) -> Iterator[Diagnostic]:
    """Runs `inferplane.plugins.checkup` and ends it, with all that it started, when its time is over."""
    is_late = threading.Event()
    current = "start"
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inferplane.plugins.checkup", name],
            stdout=subprocess.PIPE,
            stderr=said,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        timer = threading.Timer(timeout_s, _end, (process, is_late))
        timer.start()
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    message = json.loads(line)
                    if "begin" in message:
                        current = message["begin"]
                    else:
                        yield Diagnostic(**{**message, "health": Health(message["health"])})
                code = process.wait()
            finally:
                timer.cancel()
                _end(process, threading.Event())
        said.seek(0)
        last_words = said.read().rstrip().rpartition("\n")[2].strip()
    mend = f"uninstall it, or report it to its author: plugin {name!r} must not take others down"
    if is_late.is_set():
        yield Diagnostic(
            current, Health.FAULT, f"was still running after {timeout_s:g} s and was ended", mend
        )
    elif code:
        words = f"; it said last: {last_words}" if last_words else ""
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        yield Diagnostic(current, Health.FAULT, f"ended its process ({how}){words}", mend)


def _end(process: subprocess.Popen[str], is_late: threading.Event) -> None:
    if process.poll() is None:
        is_late.set()
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
