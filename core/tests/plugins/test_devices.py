"""Probing and choosing: the user's word first, then the score, and a tie is for the user to settle."""

from __future__ import annotations

import time

import pytest

from inferplane.plugins import PluginError, PluginSet, PluginStatus, load_plugins
from toy_plugins import ToyIndex

PROBE = """
from inferplane.api import *
import time
MANIFEST = PluginManifest(name={name!r}, api=(2, 0), provides=("platform",))
@hookimpl
def probe_devices():
    {body}
"""


def record_of(plugins: PluginSet, name: str):
    return next(record for record in plugins.records if record.name == name)


def test_the_highest_score_is_the_default(toys: ToyIndex) -> None:
    toys.install_platform("alpha", 300)
    toys.install_platform("beta", 200)
    plugins = load_plugins()
    device = plugins.select_device()
    assert (device.platform, device.index) == ("alpha", 0)
    assert record_of(plugins, "beta").status is PluginStatus.AVAILABLE
    assert record_of(plugins, "beta").score == 200
    assert record_of(plugins, "beta").reason == "2 × toy card"
    assert plugins.platform(device).name == "alpha"
    assert plugins.platform(device) is plugins.platform(device)


def test_a_tie_names_both_and_the_way_out(toys: ToyIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    toys.install_platform("alpha", 300)
    toys.install_platform("beta", 300)
    with pytest.raises(PluginError, match=r"'alpha' and 'beta'.*--device alpha.*INFERPLANE_DEVICE=alpha"):
        load_plugins().select_device()
    assert load_plugins().select_device("beta").platform == "beta"
    monkeypatch.setenv("INFERPLANE_DEVICE", "beta")
    assert load_plugins().select_device().platform == "beta"


def test_the_option_beats_the_environment_beats_the_score(
    toys: ToyIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.install_platform("alpha", 300)
    toys.install_platform("beta", 200)
    monkeypatch.setenv("INFERPLANE_DEVICE", "beta:1")
    device = load_plugins().select_device()
    assert (device.platform, device.index) == ("beta", 1)
    assert load_plugins().select_device("reference").platform == "reference"


def test_an_unknown_choice_lists_what_is_installed_and_why_not(
    toys: ToyIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    toys.install("broken", "raise ImportError('libtoy.so.1')")
    toys.install(
        "away", PROBE.format(name="away", body="return Unsupported('away', 'no toy card in any slot')")
    )
    plugins = load_plugins()
    with pytest.raises(PluginError, match=r"(?s)--device asks.*reference \(inferplane"):
        plugins.select_device("gamma")
    for part in ("libtoy.so.1", "no toy card in any slot"):
        with pytest.raises(PluginError, match=part):
            plugins.select_device("gamma")
    monkeypatch.setenv("INFERPLANE_DEVICE", "gamma")
    with pytest.raises(PluginError, match=r"INFERPLANE_DEVICE asks for platform 'gamma'"):
        load_plugins().select_device()


def test_a_mistyped_device_lists_platforms_only(toys: ToyIndex) -> None:
    toys.install_platform("alpha", 300)
    toys.install(
        "models", "from inferplane.api import *\nMANIFEST = PluginManifest('models', (2, 0), ('models',))\n"
    )
    with pytest.raises(PluginError, match=r"(?s)'alhpa'.*\balpha \(toy-alpha") as caught:
        load_plugins().select_device("alhpa")
    assert "toy-models" not in str(caught.value)


def test_a_chosen_platform_that_is_not_here_says_why(toys: ToyIndex) -> None:
    toys.install(
        "away", PROBE.format(name="away", body="return Unsupported('away', 'no toy card in any slot')")
    )
    with pytest.raises(PluginError, match=r"toy-away 1\.2\.3.*unavailable: no toy card in any slot"):
        load_plugins().select_device("away")


@pytest.mark.parametrize("requested", ["alpha:2", "alpha:"])
def test_an_index_that_is_not_there(toys: ToyIndex, requested: str) -> None:
    toys.install_platform("alpha", 300)
    with pytest.raises(PluginError, match=r"alpha:0 \(toy card\), alpha:1|NAME:INDEX"):
        load_plugins().select_device(requested)


@pytest.mark.parametrize("requested", [":1", "alpha:x", "alpha:-1", "alpha:1:2", "alpha:²"])
def test_a_device_that_is_not_understood(toys: ToyIndex, requested: str) -> None:
    toys.install_platform("alpha", 300)
    with pytest.raises(PluginError, match="NAME or NAME:INDEX"):
        load_plugins().select_device(requested)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise OSError('driver and library differ')", "OSError: driver and library differ"),
        ("import sys; sys.exit(1)", "SystemExit: 1"),
        ("return None", "must return Supported or Unsupported"),
        ("return [1]", "must return Supported or Unsupported"),
        ("return Supported('bad', 50, ())", "without a device"),
        (
            "return Supported('bad', 50, DeviceDescriptor('bad', 0, 'x', 1))",
            "must be a tuple of DeviceDescriptor",
        ),
        ("return Supported('bad', 50, ('bad:0',))", "each must be a DeviceDescriptor"),
        (
            "return Supported('bad', '50', (DeviceDescriptor('bad', 0, 'x', 1),))",
            "score '50'; it must be a whole",
        ),
        (
            "return Supported('bad', 50, (DeviceDescriptor('bad', 0, 'x', '1 GB'),))",
            "total_memory_bytes '1 GB'",
        ),
        ("return Supported('other', 50, (DeviceDescriptor('other', 0, 'x', 1),))", "must be 'bad'"),
        ("return Supported('bad', 50, (DeviceDescriptor('other', 0, 'x', 1),))", "must be 'bad'"),
    ],
)
def test_a_probe_that_goes_wrong(
    toys: ToyIndex, caplog: pytest.LogCaptureFixture, body: str, reason: str
) -> None:
    toys.install("bad", PROBE.format(name="bad", body=body))
    toys.install_platform("sound", 300)
    plugins = load_plugins()
    assert plugins.select_device().platform == "sound"
    assert record_of(plugins, "bad").status is PluginStatus.FAILED
    assert reason in (record_of(plugins, "bad").reason or "")
    assert sum("'bad'" in record.message for record in caplog.records) == 1
    with pytest.raises(PluginError, match="failed"):
        plugins.select_device("bad")


def test_a_probe_that_hangs_is_given_up(toys: ToyIndex) -> None:
    for name in ("stuck", "jammed"):
        toys.install(name, PROBE.format(name=name, body="time.sleep(30)"))
    toys.install_platform("sound", 300)
    plugins = PluginSet(quiet=True, probe_timeout_s=0.3)
    start = time.monotonic()
    assert plugins.select_device().platform == "sound"
    assert time.monotonic() - start < 5  # both at once, and the time is not added up
    assert "no answer within 0.3 s" in (record_of(plugins, "stuck").reason or "")


def test_a_plugin_without_devices_is_no_platform(toys: ToyIndex) -> None:
    toys.install(
        "models", "from inferplane.api import *\nMANIFEST = PluginManifest('models', (2, 0), ('models',))\n"
    )
    plugins = load_plugins()
    plugins.probe()
    assert record_of(plugins, "models").status is PluginStatus.LOADED
    with pytest.raises(PluginError, match="'models'"):
        plugins.select_device("models")


def test_a_platform_that_makes_nothing(toys: ToyIndex) -> None:
    body = "return Supported('empty', 300, (DeviceDescriptor('empty', 0, 'x', 1),))"
    toys.install(
        "empty",
        PROBE.format(name="empty", body=body) + "@hookimpl\ndef create_platform(device): return None\n",
    )
    plugins = load_plugins()
    with pytest.raises(PluginError, match="made None for its device"):
        plugins.platform(plugins.select_device())


def test_a_platform_without_the_hook_that_makes_it(toys: ToyIndex) -> None:
    body = "return Supported('halved', 300, (DeviceDescriptor('halved', 0, 'x', 1),))"
    toys.install("halved", PROBE.format(name="halved", body=body))
    plugins = load_plugins()
    with pytest.raises(PluginError, match=r"'halved' \(toy-halved 1\.2\.3\) has no hook create_platform"):
        plugins.platform(plugins.select_device("halved"))
