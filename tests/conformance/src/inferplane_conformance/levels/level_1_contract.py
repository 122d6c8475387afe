"""Level 1: what the plugin's hooks return is what the contract says, and survives the way to another process."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
import torch

from inferplane.api import DeviceRuntime, Platform, Supported
from inferplane.api.attention import AttentionBackend
from inferplane.api.linear import LinearKernel
from inferplane.api.manifest import API_VERSION, PREVIOUS_API_VERSION
from inferplane.api.ops import OPS, OpImpl
from inferplane.api.quant import QuantizedLinearKernel
from inferplane.api.quantized_experts import QuantizedExpertsKernel
from inferplane.api.worker import Worker
from inferplane.config import EngineArgs
from inferplane.config.engine import DTYPES
from inferplane_conformance.signature import overrides_that_do_not_fit
from inferplane_conformance.subject import Subject

OFFERS: dict[str, type] = {
    "attention_backends": AttentionBackend,
    "linear_kernels": LinearKernel,
    "quantized_linear_kernels": QuantizedLinearKernel,
    "quantized_experts_kernels": QuantizedExpertsKernel,
}
"""Hooks that offer classes for a device, with the base of what they offer."""
NEEDED_DEFAULTS = ("dtype", "block_size", "max_num_seqs", "max_num_batched_tokens")

# What a worker process does first, with nothing but the descriptor from its parent.
REMAKE = """
import sys, msgspec
from inferplane.api import DeviceDescriptor
from inferplane.plugins import load_plugins
platform, index = {platform!r}, {index}
plugins = load_plugins(quiet=True)
device = plugins.select_device(f"{{platform}}:{{index}}")
made = plugins.platform(device)
print(type(made).__module__, made.worker_class().__name__, type(made.device_runtime(device)).__name__)
"""


def offered(subject: Subject, hook: str) -> list[Any]:
    """What the platform's own plugin returns."""
    found = dict(subject.plugins.collect(hook, subject.device))
    return list(found.get(subject.device.platform, []))


@pytest.mark.without_device
def test_the_plugin_was_loaded_for_an_api_that_is_served(subject: Subject) -> None:
    record = subject.record
    assert record.is_usable, record.reason
    assert record.api is not None
    major, minor = (int(part) for part in record.api.split("."))
    newest = {version[0]: version for version in (API_VERSION, PREVIOUS_API_VERSION)}
    assert major in newest
    assert (major, minor) <= newest[major]


def test_probing_answers_with_devices(subject: Subject) -> None:
    [answer] = [each for each in subject.plugins.probe() if each.platform == subject.device.platform]
    assert isinstance(answer, Supported)
    assert answer.score >= 0
    assert len({device.index for device in answer.devices}) == len(answer.devices) > 0
    for device in answer.devices:
        assert device.platform == answer.platform
        assert device.name
        assert device.total_memory_bytes > 0


@pytest.mark.without_device
def test_the_platform_is_whole(subject: Subject) -> None:
    assert isinstance(subject.platform, Platform)
    assert not overrides_that_do_not_fit(type(subject.platform), Platform)
    worker_class = subject.platform.worker_class()
    assert isinstance(worker_class, type)
    assert issubclass(worker_class, Worker)
    assert not inspect.isabstract(worker_class), f"{worker_class.__name__} leaves methods of Worker open"
    assert not overrides_that_do_not_fit(worker_class, Worker)


def test_the_runtime_is_whole(subject: Subject) -> None:
    runtime = subject.platform.device_runtime(subject.device)
    assert isinstance(runtime, DeviceRuntime)
    assert not overrides_that_do_not_fit(type(runtime), DeviceRuntime)
    assert runtime.descriptor == subject.device
    assert isinstance(runtime.torch_device, torch.device)


@pytest.mark.without_device
@pytest.mark.parametrize("hook", OFFERS)
def test_what_is_offered_is_whole(subject: Subject, hook: str) -> None:
    base = OFFERS[hook]
    classes = offered(subject, hook)
    if not classes:
        pytest.skip(f"the platform brings no {hook.replace('_', ' ')}: the reference is used")
    names = [each.name for each in classes]
    assert len(set(names)) == len(names), f"two share a name: {names}"
    for each in classes:
        assert issubclass(each, base)
        assert not inspect.isabstract(each), f"{each.__name__} leaves methods of {base.__name__} open"
        assert not overrides_that_do_not_fit(each, base)
        assert isinstance(each.priority, int)


@pytest.mark.without_device
def test_op_implementations_have_the_references_signature(subject: Subject) -> None:
    implementations = offered(subject, "op_implementations")
    if not implementations:
        pytest.skip("the platform brings no ops: the references are used")
    for each in implementations:
        assert isinstance(each, OpImpl)
        assert each.op in OPS, f"{each.op!r} is no declared op"
        assert each.provider
        wanted = inspect.signature(OPS[each.op].reference)
        try:
            found = inspect.signature(each.fn)
        except ValueError:  # a builtin, as compiled ops are
            continue
        positional = [p.name for p in wanted.parameters.values() if p.kind is not p.KEYWORD_ONLY]
        keywords = {p.name: None for p in wanted.parameters.values() if p.kind is p.KEYWORD_ONLY}
        try:
            found.bind(*positional, **keywords)
        except TypeError as error:
            pytest.fail(f"{each.provider}'s {each.op}{found} cannot be called as {each.op}{wanted}: {error}")


@pytest.mark.without_device
@pytest.mark.parametrize("checkpoint_dtype", DTYPES)
def test_config_defaults_are_complete(subject: Subject, checkpoint_dtype: str) -> None:
    defaults = subject.defaults(checkpoint_dtype)
    assert not set(NEEDED_DEFAULTS) - defaults.keys()
    assert not defaults.keys() - {field.name for field in dataclasses.fields(EngineArgs)}
    assert defaults["dtype"] in DTYPES
    for name in NEEDED_DEFAULTS[1:]:
        assert isinstance(defaults[name], int)
        assert defaults[name] > 0


@pytest.mark.without_device
def test_the_configuration_survives_the_way_to_a_rank(subject: Subject) -> None:
    config = subject.config("float32")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=type(config)) == config


def test_a_fresh_process_makes_the_same_platform(subject: Subject) -> None:
    script = REMAKE.format(platform=subject.device.platform, index=subject.device.index)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    runtime = type(subject.platform.device_runtime(subject.device)).__name__
    made = [type(subject.platform).__module__, subject.platform.worker_class().__name__, runtime]
    assert done.stdout.split()[-3:] == made


@pytest.mark.without_device
def test_loading_the_plugin_leaves_the_core_as_it_was(subject: Subject) -> None:
    command = [sys.executable, "-m", "inferplane_conformance.source.core_snapshot", subject.name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    changed = json.loads(done.stdout.strip().splitlines()[-1])
    assert not changed, f"the plugin changes the core while it is loaded: {', '.join(changed)}"
