"""The doctor finds what is wrong, says it in one line with its mend, and ends in time whatever a plugin does."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from inferplane.api import Diagnostic, Health
from inferplane.cli.plugins import plugins as plugins_command
from inferplane.plugins import PluginError
from inferplane.plugins.doctor import check_installation, examine, examine_plugin
from toy_plugins import ToyIndex

HEAD = """
from inferplane.api import *
MANIFEST = PluginManifest(name="toy", api=API_VERSION, provides=())
"""
PLATFORM = (
    HEAD
    + """
@hookimpl
def probe_devices(): return Supported("toy", 1, (DeviceDescriptor("toy", 0, "toy card", 1 << 30),))
@hookimpl
def create_platform(device):
    if device.platform != "toy": return None
    from inferplane.reference.platform import ReferencePlatform
    class ToyPlatform(ReferencePlatform): pass
    return ToyPlatform()
"""
)


@pytest.fixture
def toy(toys: ToyIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Installs a plugin where the doctor's children find it too, and returns what is found, by check."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    def install(source: str, timeout_s: float = 60.0) -> dict[str, Diagnostic]:
        toys.install("toy", source)
        return {found.check: found for found in examine_plugin("toy", timeout_s)}

    return install


def test_a_sound_platform(toy) -> None:
    found = toy(PLATFORM)
    assert {
        "import",
        "devices",
        "memory",
        "copies",
        "op rms_norm",
        "op rotary",
        "linear product",
    } <= found.keys()
    assert {each.health for each in found.values()} == {Health.OK}
    assert found["import"].found == "toy-toy 1.2.3, plugin API 2.0"
    assert found["devices"].found == "toy card (score 1)"


def test_a_wrong_op_and_a_wrong_product(toy) -> None:
    found = toy(
        PLATFORM
        + """
@hookimpl
def op_implementations(device):
    from inferplane.api.ops import OPS, OpImpl
    def broken(*inputs): raise OSError("no such kernel")
    return [
        OpImpl("rms_norm", lambda *inputs: OPS["rms_norm"].reference(*inputs) * 1.01, "toy"),
        OpImpl("silu_and_mul", broken, "toy"),
    ]
@hookimpl
def linear_kernels(device):
    from inferplane.api.linear import LinearKernel
    class Off(LinearKernel):
        name, priority = "off", 500
        @classmethod
        def unsupported_reason(cls, shape, device): return None
        @classmethod
        def prepare(cls, weight, bias): return lambda x: x @ weight.T * 1.01
    return [Off]
"""
    )
    assert found["op rms_norm"].health == Health.FAULT
    assert "off its reference" in found["op rms_norm"].found
    assert "author" in (found["op rms_norm"].mend or "")
    raised = "OSError: no such kernel, raised in broken (toy_toy_module.py, line 17)"
    assert found["op silu_and_mul"] == Diagnostic("op silu_and_mul", Health.FAULT, raised)
    assert found["op rotary"].health == Health.OK
    assert found["linear product"].health == Health.FAULT


def test_what_the_plugin_says_of_itself(toy) -> None:
    found = toy(
        HEAD
        + """
@hookimpl
def diagnose():
    print("noise on standard output")
    return [Diagnostic("driver", Health.WARNING, "version 3", "toyctl upgrade")]
"""
    )
    assert found["driver"] == Diagnostic("driver", Health.WARNING, "version 3", "toyctl upgrade")


@pytest.mark.parametrize(
    ("source", "check", "words"),
    [
        ("import time; time.sleep(60)", "import", "was still running after 2 s and was ended"),
        (HEAD + "@hookimpl\ndef diagnose():\n  while True: pass\n", "its own checks", "still running after 2 s"),
        ("import os; os.abort()", "import", "ended its process (signal 6)"),
        ("import os; os.write(2, b'the driver says no\\n'); os._exit(3)", "import",
         "ended its process (exit status 3); it said last: the driver says no"),
        ("raise ImportError('libtoy.so.1')", "import", "failed: importing toy_toy_module: ImportError: libtoy.so.1"),
        (HEAD + "@hookimpl\ndef diagnose(): 1 / 0\n", "its own checks", "ZeroDivisionError: division by zero"),
        (HEAD + "@hookimpl\ndef probe_devices(): raise OSError('driver and library differ')\n", "devices",
         "probing for devices: OSError: driver and library differ"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_line(toy, source: str, check: str, words: str) -> None:
    started = time.monotonic()
    found = toy(source, timeout_s=2.0 if "2 s" in words else 60.0)
    assert time.monotonic() - started < 30
    assert found[check].health == Health.FAULT
    assert words in found[check].found


def test_a_heavy_import_is_a_warning(toy) -> None:
    found = toy("import torch\n" + HEAD)
    assert found["import"].health == Health.WARNING
    assert found["import"].found == "imports torch at every start"


def test_one_plugin_is_examined_without_the_others(toys: ToyIndex, toy) -> None:
    toys.install("stuck", "import time; time.sleep(60)")
    assert toy(HEAD)["import"].health == Health.OK


def test_an_unknown_name_lists_those_that_are_there() -> None:
    with pytest.raises(PluginError, match="no plugin 'gone' is installed; there are: reference"):
        list(examine(["gone"]))


def test_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {found.health for found in check_installation()} == {Health.OK}
    monkeypatch.setattr("inferplane.plugins.doctor.version", lambda name: "1.0")
    found = {each.check: each for each in check_installation()}
    assert found["torch"].health == Health.FAULT
    assert found["torch"].mend == 'pip install "torch>=2.11"'


def run(*words: str) -> Result:
    return CliRunner().invoke(plugins_command, ["doctor", *words])


def test_the_command(toy) -> None:
    toy("raise ImportError('libtoy.so.1')")
    result = run("toy")
    assert result.exit_code == 1
    line = "FAULT   toy: import: failed: importing toy_toy_module: ImportError: libtoy.so.1\n"
    assert line + "        mend: pip install --force-reinstall toy-toy, or uninstall it" in result.output
    result = run("toy", "--json")
    assert {"plugin": "toy", "check": "import", "health": "fault"}.items() <= json.loads(result.output)[
        -1
    ].items()


def test_a_runtime_that_was_not_returned(toy) -> None:
    source = PLATFORM.replace(
        "class ToyPlatform(ReferencePlatform): pass",
        "class ToyPlatform(ReferencePlatform):\n        def device_runtime(self, device): pass",
    )
    found = toy(source)
    assert "device_runtime of platform 'toy' returned None" in found["memory"].found


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            "1 << 34",
            "memory of the runtime of platform 'toy' returned 17179869184, not an inferplane.api.MemoryInfo",
        ),
        (
            "MemoryInfo(1 << 34, 0.5)",
            "platform 'toy' says that available_bytes is 0.5, not a whole number of bytes",
        ),
        ("MemoryInfo(-1, 0)", "platform 'toy' says that total_bytes is -1, not a whole number of bytes"),
    ],
)
def test_memory_that_is_no_memory(toy, answer: str, message: str) -> None:
    source = PLATFORM.replace(
        "class ToyPlatform(ReferencePlatform): pass",
        "from inferplane.api import MemoryInfo\n"
        "    from inferplane.reference.platform import HostRuntime\n"
        "    class ToyRuntime(HostRuntime):\n"
        f"        def memory(self): return {answer}\n"
        "    class ToyPlatform(ReferencePlatform):\n"
        "        def device_runtime(self, device): return ToyRuntime(device)",
    )
    found = toy(source)
    assert message in found["memory"].found
