"""The checks of one plugin, in a process of its own: ``python -m inferplane.plugins.checkup NAME``.

Prints one JSON object a line: ``{"begin": check}`` before whatever may hang or crash, then the `Diagnostic` itself. The
parent, `inferplane.plugins.doctor`, bounds the time and tells what was going on when it ran out.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from inferplane.api.diagnosis import Diagnostic, Health
from inferplane.plugins.blame import blame
from inferplane.plugins.plugin_set import PluginSet
from inferplane.plugins.record import PluginRecord, PluginStatus, describe

if TYPE_CHECKING:
    import torch

    from inferplane.api.device import DeviceDescriptor, DeviceRuntime
    from inferplane.api.ops import Op

LIGHT_IMPORT_S = 0.5
"""Processor time of an import that a user would notice at every command."""

Checks = Iterator[tuple[str, Callable[[], Iterable[Diagnostic]]]]


def main(name: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a plugin prints is not part of the answer
    for check, run in checks(name):
        print(json.dumps({"begin": check}), file=out, flush=True)
        try:
            found = list(run())
        except (Exception, SystemExit) as error:
            found = [Diagnostic(check, Health.FAULT, _raised(error))]
        for diagnostic in found:
            print(json.dumps(asdict(diagnostic)), file=out, flush=True)


def checks(name: str) -> Checks:
    """What to look at, lazily: later checks use what earlier ones made."""
    made: list[PluginSet] = []
    yield "import", lambda: _import(name, made)
    plugins = made[0] if made else None
    if plugins is None or not _record(plugins, name).is_usable:
        return
    yield "devices", lambda: _devices(plugins, name)
    yield "its own checks", lambda: _own_checks(plugins, name)
    if _record(plugins, name).status is not PluginStatus.AVAILABLE:
        return
    device = plugins.select_device(name)
    yield "memory", lambda: _memory(plugins, device)
    yield "copies", lambda: _copies(plugins, device)
    yield "ops", lambda: _ops(plugins, device)
    yield "linear product", lambda: _linear(plugins, device)


def _raised(error: BaseException) -> str:
    fault = blame(error)
    return f"{describe(error)}, raised in {fault.place}" if fault else describe(error)


def _record(plugins: PluginSet, name: str) -> PluginRecord:
    return next(record for record in plugins.records if record.name == name)


def _import(name: str, made: list[PluginSet]) -> Iterator[Diagnostic]:
    started = time.process_time()
    plugins = PluginSet(quiet=True, only=(name,))
    took_s = time.process_time() - started
    made.append(plugins)
    record = _record(plugins, name)
    label = f"{record.distribution} {record.version}, plugin API {record.api}"
    if not record.is_usable:
        yield Diagnostic("import", Health.FAULT, f"{record.status}: {record.reason}", _mend(record))
        return
    yield Diagnostic("import", Health.OK, label)
    for note in record.notes:
        yield Diagnostic("plugin API", Health.WARNING, note, f"pip install --upgrade {record.distribution}")
    if heavy := sorted({"torch", "transformers"} & sys.modules.keys()):
        mend = "tell its author: heavy imports belong inside its hooks"
        yield Diagnostic("import", Health.WARNING, f"imports {' and '.join(heavy)} at every start", mend)
    elif took_s > LIGHT_IMPORT_S:
        yield Diagnostic("import", Health.WARNING, f"takes {took_s:.1f} s at every start")


def _mend(record: PluginRecord) -> str | None:
    if record.status is PluginStatus.REFUSED:
        return None  # the reason says it
    return f"pip install --force-reinstall {record.distribution}, or uninstall it"


def _devices(plugins: PluginSet, name: str) -> Iterator[Diagnostic]:
    plugins.probe()
    record = _record(plugins, name)
    if record.status is PluginStatus.AVAILABLE:
        yield Diagnostic("devices", Health.OK, f"{record.reason} (score {record.score})")
    elif record.status is PluginStatus.UNAVAILABLE:
        yield Diagnostic("devices", Health.WARNING, f"not usable on this machine: {record.reason}")
    elif record.status is PluginStatus.FAILED:
        yield Diagnostic("devices", Health.FAULT, record.reason or "")


def _own_checks(plugins: PluginSet, name: str) -> Iterator[Diagnostic]:
    for plugin, diagnostics in plugins.diagnose():
        if plugin == name:
            yield from diagnostics
    record = _record(plugins, name)
    if not record.is_usable:
        yield Diagnostic("its own checks", Health.FAULT, record.reason or "")


def _runtime(plugins: PluginSet, device: DeviceDescriptor) -> DeviceRuntime:
    from inferplane.runner.device_runtime import make_runtime

    return make_runtime(plugins.platform(device), device)


def _memory(plugins: PluginSet, device: DeviceDescriptor) -> Iterator[Diagnostic]:
    from inferplane.runner.device_runtime import device_memory

    memory = device_memory(_runtime(plugins, device), device)
    gib = 2**30
    found = f"{memory.available_bytes / gib:.1f} of {memory.total_bytes / gib:.1f} GiB are available"
    if memory.available_bytes < memory.total_bytes / 10:
        yield Diagnostic("memory", Health.WARNING, found, "end what else uses the device")
    else:
        yield Diagnostic("memory", Health.OK, found)


def _copies(plugins: PluginSet, device: DeviceDescriptor) -> Iterator[Diagnostic]:
    import torch

    runtime = _runtime(plugins, device)
    sent = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    got = runtime.to_host(runtime.to_device(sent))
    if torch.equal(sent, got):
        yield Diagnostic("copies", Health.OK, "a tensor came back from the device as it was")
    else:
        yield Diagnostic("copies", Health.FAULT, "a tensor came back from the device changed")


def _ops(plugins: PluginSet, device: DeviceDescriptor) -> Iterator[Diagnostic]:
    """Every op on the device in float32, by whoever wins it, against its reference in float64 on the host."""
    import torch

    from inferplane.api.ops import OPS

    runtime = _runtime(plugins, device)
    table = plugins.resolve_ops(device, torch.float32)
    for name, op in OPS.items():
        try:
            distance = _distance(op, getattr(table, name), runtime)
        except Exception as error:
            yield Diagnostic(f"op {name}", Health.FAULT, _raised(error))
            continue
        if distance <= op.tolerances[torch.float32][1]:
            yield Diagnostic(f"op {name}", Health.OK, "agrees with its reference")
        else:
            mend = "report it to the plugin's author: answers are wrong"
            yield Diagnostic(f"op {name}", Health.FAULT, f"is {distance:.2g} off its reference", mend)


def _distance(op: Op, fn: Callable[..., object], runtime: DeviceRuntime) -> float:
    """The largest distance from the reference, less what the op's relative tolerance allows."""
    import torch

    inputs = op.example_inputs(torch.Generator().manual_seed(0), torch.float32)
    there = [runtime.to_device(x.clone()) if isinstance(x, torch.Tensor) else x for x in inputs]
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs]
    relative = op.tolerances[torch.float32][0]
    results = [runtime.to_host(got).double() for got in _tuple(fn(*there))]
    expected = [want.double() for want in _tuple(op.reference(*wide))]
    return max(
        float(((got - want).abs() - relative * want.abs()).max())
        for got, want in zip(results, expected, strict=True)
    )


def _linear(plugins: PluginSet, device: DeviceDescriptor) -> Iterator[Diagnostic]:
    import torch

    from inferplane.api.linear import LinearShape

    runtime = _runtime(plugins, device)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=generator) for shape in ((5, 64), (32, 64)))
    kernel = plugins.choose_linear(LinearShape("doctor", 64, 32, torch.float32, False), device)
    got = runtime.to_host(kernel.prepare(runtime.to_device(weight), None)(runtime.to_device(x)))
    distance = float((got.double() - x.double() @ weight.double().T).abs().max())
    if distance < 1e-2:  # devices may multiply float32 in a shorter format
        yield Diagnostic("linear product", Health.OK, f"{kernel.name} agrees with float64")
    else:
        yield Diagnostic(
            "linear product", Health.FAULT, f"{kernel.name} differs from float64 by {distance:.2g}"
        )


def _tuple(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


if __name__ == "__main__":
    main(sys.argv[1])
