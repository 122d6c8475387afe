"""Ops, linear kernels and attention backends: who wins, and what is said of those who did not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from inferplane.api import DeviceDescriptor
from inferplane.api.attention import AttentionLayer, AttentionQuery
from inferplane.api.kv import FullAttentionSpec, KVCacheSpec
from inferplane.api.linear import LinearShape
from inferplane.api.ops import OPS
from inferplane.config import ConfigError
from inferplane.plugins import PluginError, load_plugins
from toy_plugins import PLATFORM, ToyIndex

OPS_PLUGIN = """
from inferplane.api import *
MANIFEST = PluginManifest(name={name!r}, api=(2, 0), provides=("ops",))
def doubled(*args): return {name!r}
@hookimpl
def op_implementations(device):
    from inferplane.api.ops import OpImpl
    def reason(query):
        {reason}
    return [OpImpl({op!r}, doubled, {name!r}, reason, priority={priority})]
"""

BACKENDS_PLUGIN = """
from inferplane.api import *
MANIFEST = PluginManifest(name="extra", api=(2, 0), provides=("kernels",))
@hookimpl
def attention_backends(device):
    from inferplane.api.attention import AttentionBackend
    class Wide(AttentionBackend):
        name, priority = "wide", 500
        @classmethod
        def unsupported_reason(cls, query):
            head_dim = query.layer.head_dim
            return None if head_dim >= 128 else f"head_dim must be at least 128, not {head_dim}"
        @classmethod
        def allocate_kv(cls, layer, num_blocks, dtype, device): ...
        def forward(self, *args): ...
    return [Wide]
@hookimpl
def linear_kernels(device):
    from inferplane.api.linear import LinearKernel
    class Even(LinearKernel):
        name, priority = "even", 500
        @classmethod
        def unsupported_reason(cls, shape, device): return "odd" if shape.in_features % 2 else None
        @classmethod
        def prepare(cls, weight, bias): ...
    return [Even]
"""


def ops_plugin(name: str, op: str = "rms_norm", priority: int = 0, reason: str = "return None") -> str:
    return OPS_PLUGIN.format(name=name, op=op, priority=priority, reason=reason)


def query(device: DeviceDescriptor, head_dim: int = 64, spec: KVCacheSpec | None = None) -> AttentionQuery:
    spec = spec or FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=head_dim, dtype="float32")
    layer = AttentionLayer(name="l0", num_heads=4, num_kv_heads=2, head_dim=head_dim, scale=0.1, spec=spec)
    return AttentionQuery(layer=layer, dtype=torch.float32, kv_dtype=torch.float32, device=device)


@pytest.fixture
def device() -> DeviceDescriptor:
    return load_plugins(quiet=True).select_device("reference")


def test_an_op_that_nobody_provides_runs_on_its_reference(toys: ToyIndex, device: DeviceDescriptor) -> None:
    table = load_plugins().resolve_ops(device, torch.float32)
    for name, op in OPS.items():
        assert getattr(table, name) is op.reference
    with pytest.raises(AttributeError, match="frozen"):
        table.rms_norm = None  # type: ignore[assignment]


def test_the_highest_priority_that_supports_wins_and_the_rest_say_why_not(
    toys: ToyIndex, device: DeviceDescriptor
) -> None:
    toys.install("low", ops_plugin("low", priority=1))
    toys.install(
        "high",
        ops_plugin(
            "high", priority=9, reason="return 'bfloat16 only' if 'float32' in str(query.dtype) else None"
        ),
    )
    toys.install("sick", ops_plugin("sick", priority=99, reason="raise OSError('no such symbol')"))
    plugins = load_plugins()
    assert plugins.resolve_ops(device, torch.float32).rms_norm() == "low"
    assert plugins.resolve_ops(device, torch.bfloat16).rms_norm() == "high"
    decision = next(d for d in plugins.op_decisions(device, torch.float32) if d.subject == "op rms_norm")
    assert decision.chosen.name == "low"
    assert [(c.name, c.reason) for c in decision.candidates] == [
        ("sick", "its check raised OSError: no such symbol"),
        ("high", "bfloat16 only"),
        ("low", None),
        ("reference", None),
    ]


def test_an_undeclared_op_is_refused_with_the_declared_ones(toys: ToyIndex, device: DeviceDescriptor) -> None:
    toys.install("odd", ops_plugin("odd", op="rms_nrom"))
    with pytest.raises(PluginError, match=r"(?s)'odd' implements .*rms_nrom.*declared ops are .*rms_norm"):
        load_plugins().resolve_ops(device, torch.float32)


def test_attention_backends_are_chosen_by_priority_support_and_name(
    toys: ToyIndex, device: DeviceDescriptor
) -> None:
    toys.install("extra", BACKENDS_PLUGIN)
    plugins = load_plugins()
    assert plugins.choose_attention(query(device, 128)).name == "wide"
    assert plugins.choose_attention(query(device, 64)).name == "reference"
    assert plugins.choose_attention(query(device, 128), "reference").name == "reference"
    with pytest.raises(
        PluginError, match=r"(?s)layer l0.*wide \(extra\): head_dim must be at least 128, not 64"
    ):
        plugins.choose_attention(query(device, 64), "wide")
    with pytest.raises(
        PluginError, match=r"'narrow' .--attention-backend. is not installed.*reference.*wide"
    ):
        plugins.choose_attention(query(device, 64), "narrow")
    with pytest.raises(PluginError, match=r"FullAttentionSpec, .*not of KVCacheSpec"):
        plugins.choose_attention(query(device, 64, KVCacheSpec(block_size=16)))


def test_linear_kernels(toys: ToyIndex, device: DeviceDescriptor) -> None:
    toys.install("extra", BACKENDS_PLUGIN)
    plugins = load_plugins()
    names = {
        size: plugins.choose_linear(LinearShape("w", size, 8, torch.float32, False), device).name
        for size in (7, 8)
    }
    assert names == {7: "reference", 8: "even"}
    assert {kernel.name for kernel in plugins.linear_kernels(device)} >= {"reference", "even"}


def test_the_devices_own_platform_must_not_fail(toys: ToyIndex) -> None:
    hook = "@hookimpl\ndef op_implementations(device): raise OSError('kernels are broken')\n"
    toys.install("alpha", PLATFORM.format(name="alpha", score=300, api=(2, 0)) + hook)
    plugins = load_plugins(quiet=True)
    with pytest.raises(PluginError, match=r"toy-alpha.*kernels are broken"):
        plugins.resolve_ops(plugins.select_device("alpha"), torch.float32)
    # another device's model has nothing to do with it
    assert plugins.resolve_ops(plugins.select_device("reference"), torch.float32)


OFFERS_FOR_EVERYTHING = """
@hookimpl
def op_implementations(device):
    from inferplane.api.ops import OpImpl
    return [OpImpl("rms_norm", lambda *args: {name!r}, {name!r}, priority=5)]
@hookimpl
def validate_config(config, device):
    raise ConfigError("dtype", {name!r} + " was asked about " + device.platform)
from inferplane.api.config import ConfigError
"""


def test_a_platform_is_asked_about_its_own_devices_only(toys: ToyIndex, device: DeviceDescriptor) -> None:
    """What it brings needs no guard; what brings no platform is asked about every device."""
    for name in ("alpha", "beta"):
        source = PLATFORM.format(name=name, score=300, api=(2, 0))
        toys.install(name, source + OFFERS_FOR_EVERYTHING.format(name=name))
    plugins = load_plugins()
    config: Any = None
    for name in ("alpha", "beta"):
        own = plugins.select_device(name)
        assert plugins.resolve_ops(own, torch.float32).rms_norm() == name
        assert {kernel.name for kernel in plugins.linear_kernels(own)} == {"reference"}
        with pytest.raises(ConfigError, match=f"{name} was asked about {name}"):
            plugins.validate_config(config, own)
    assert plugins.resolve_ops(device, torch.float32).rms_norm is OPS["rms_norm"].reference
    plugins.validate_config(config, device)
    toys.install("gamma", ops_plugin("gamma", priority=9))
    plugins = load_plugins()
    for each in (device, plugins.select_device("alpha"), plugins.select_device("beta")):
        assert plugins.resolve_ops(each, torch.float32).rms_norm() == "gamma"
