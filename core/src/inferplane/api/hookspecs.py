"""Every hook that a plugin may implement. Called at start-up only: what they return becomes frozen tables.

An implementation is a function of the plugin's module with the hook's name and the `hookimpl` marker, taking any
subset of the hook's arguments by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from inferplane.api.device import DeviceDescriptor, Supported, Unsupported

if TYPE_CHECKING:
    import torch

    from inferplane.api.attention import AttentionBackend
    from inferplane.api.linear import LinearKernel
    from inferplane.api.ops import OpImpl
    from inferplane.api.platform import Platform

PROJECT = "inferplane"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

LogitsProcessor = Callable[[list[int], "torch.Tensor"], "torch.Tensor"]
"""(output token ids so far, logits ``[vocab_size]`` float32) -> logits. Called before the other sampling settings."""

LogitsProcessorFactory = Callable[[Any, list[int], int], LogitsProcessor]
"""(the request's argument, prompt token ids, vocab_size) -> processor of one request.

Raises ValueError on a bad argument."""


@dataclass(frozen=True)
class CommandSpec:
    """A sub-command of the command line, imported only when it runs."""

    name: str
    target: str
    """``module:attribute`` of a click command."""
    help: str
    """One line for the listing."""


@hookspec
def probe_devices() -> Supported | Unsupported:  # type: ignore[empty-body]
    """Looks for the platform's devices. Fast, without importing torch and without initialising a device.

    Only platform plugins implement it. Returns `Supported` with the devices, or `Unsupported` with the reason.
    """


@hookspec(firstresult=True)
def create_platform(device: DeviceDescriptor) -> Platform | None:
    """Makes the platform that serves ``device``; None when the device is another plugin's."""


@hookspec
def attention_backends(device: DeviceDescriptor) -> Sequence[type[AttentionBackend]]:  # type: ignore[empty-body]
    """Attention backends for the device, of the platform itself or of an add-on. Called in workers."""


@hookspec
def op_implementations(device: DeviceDescriptor) -> Sequence[OpImpl]:  # type: ignore[empty-body]
    """Implementations of declared ops for the device. Called in workers."""


@hookspec
def linear_kernels(device: DeviceDescriptor) -> Sequence[type[LinearKernel]]:  # type: ignore[empty-body]
    """Kernels that multiply by a weight on the device. Called in workers."""


@hookspec
def models() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Architectures by their Hugging Face name, each as ``"module:Class"``; imported only when used."""


@hookspec
def scheduler_policies() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Orders of the waiting queue by name, each as ``"module:Class"`` of a `SchedulerPolicy`
    (`inferplane.api.scheduling`), which is made without arguments."""


@hookspec
def logits_processors() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Named logits processors, each as ``"module:factory"`` of a `LogitsProcessorFactory`.

    A request asks for one by name in ``SamplingParams.logits_processors``.
    """


@hookspec
def cli_commands() -> Sequence[CommandSpec]:  # type: ignore[empty-body]
    """Sub-commands of ``inferplane``."""


@hookspec
def collect_env() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Facts for ``inferplane collect-env``: versions, drivers, libraries. No secrets."""
