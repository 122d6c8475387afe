"""Asking platforms for their devices, with a bound on how long one may think."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inferplane.api.device import DeviceDescriptor, Supported, Unsupported

PROBE_TIMEOUT_S = 5.0

Answer = Supported | Unsupported | BaseException


class ProbeTimeout(Exception):
    """A probe that was still running when its time was up."""


def probe_all(probes: Mapping[str, Callable[[], Any]], timeout_s: float) -> dict[str, Answer]:
    """Runs every probe at once, each in a thread of its own; whatever one raises or does is its own answer.

    A thread that hangs cannot be stopped. It is a daemon and holds nothing of ours, so the process still ends.
    """
    answers: dict[str, Answer] = {}
    threads = {
        name: threading.Thread(target=_run, args=(name, probe, answers), name=f"probe-{name}", daemon=True)
        for name, probe in probes.items()
    }
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads.values():
        thread.join(max(0.0, deadline - time.monotonic()))
    late = ProbeTimeout(f"no answer within {timeout_s:g} s")
    return {name: answers.get(name, late) for name in probes}


def _run(name: str, probe: Callable[[], Any], answers: dict[str, Answer]) -> None:
    try:
        answers[name] = _checked(name, probe())
    except (Exception, SystemExit) as error:
        answers[name] = error


def _checked(name: str, answer: Any) -> Answer:
    if not isinstance(answer, Supported | Unsupported):
        raise TypeError(f"probe_devices returned {answer!r}; it must return Supported or Unsupported")
    if answer.platform != name:
        raise ValueError(f"probe_devices answered for platform {answer.platform!r}; it must be {name!r}")
    if isinstance(answer, Supported):
        if not isinstance(answer.devices, Sequence):
            raise TypeError(
                f"probe_devices gave devices={answer.devices!r}; it must be a tuple of DeviceDescriptor"
            )
        if not answer.devices:
            raise ValueError(
                "probe_devices returned Supported without a device; Unsupported says why there is none"
            )
        if not all(isinstance(device, DeviceDescriptor) for device in answer.devices):
            raise TypeError(f"probe_devices found {answer.devices!r}; each must be a DeviceDescriptor")
        if not isinstance(answer.score, int):
            raise TypeError(f"probe_devices gave the score {answer.score!r}; it must be a whole number")
        for device in answer.devices:
            if not isinstance(device.total_memory_bytes, int):
                raise TypeError(
                    f"probe_devices gave {device.name} total_memory_bytes {device.total_memory_bytes!r}; "
                    "it must be a whole number"
                )
        if strange := [device for device in answer.devices if device.platform != name]:
            raise ValueError(
                f"probe_devices returned a device of platform {strange[0].platform!r}; it must be {name!r}"
            )
    return answer
