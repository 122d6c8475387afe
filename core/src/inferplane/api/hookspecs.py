"""Every hook that a plugin may implement. Called at start-up only: what they return becomes frozen tables.

An implementation is a function of the plugin's module with the hook's name and the `hookimpl` marker, taking any
subset of the hook's arguments by name.

A hook that takes a device is called in the plugin of the platform that found it, and in every plugin that looks for no
devices of its own. It is never called about another platform's devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from inferplane.api.device import DeviceDescriptor, Supported, Unsupported
from inferplane.api.diagnosis import Diagnostic

if TYPE_CHECKING:
    import torch

    from inferplane.api.attention import AttentionBackend
    from inferplane.api.config import EngineConfig
    from inferplane.api.kv import KVCacheSpec
    from inferplane.api.kv_manager import GroupManager
    from inferplane.api.linear import LinearKernel
    from inferplane.api.ops import OpImpl
    from inferplane.api.platform import Platform
    from inferplane.api.quant import QuantizedLinearKernel
    from inferplane.api.quantized_experts import QuantizedExpertsKernel

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


@dataclass(frozen=True, kw_only=True)
class OptionSpec:
    """A setting of a plugin's own. It is an option of every command that starts an engine, and a key of
    ``LLM(plugin_options={…})``; what was set stands in `EngineConfig.plugin_options` under its name.
    """

    name: str
    """Begins with the plugin's name and an underscore, so that no two can collide: ``example_level`` of ``example``."""
    help: str
    """One sentence."""
    kind: type[str] | type[int] | type[float] | type[bool] = str
    default: str | int | float | bool | None = None
    choices: tuple[str, ...] = ()
    """Of a text: all that it may be; empty where anything goes."""


@hookspec
def probe_devices() -> Supported | Unsupported:  # type: ignore[empty-body]
    """Looks for the platform's devices. Fast, without importing torch and without initialising a device.

    Only platform plugins implement it. Returns `Supported` with the devices, or `Unsupported` with the reason.
    """


@hookspec(firstresult=True)
def create_platform(device: DeviceDescriptor) -> Platform | None:
    """Makes the platform that serves ``device``, one of those that the plugin's `probe_devices` returned."""


@hookspec
def attention_backends(device: DeviceDescriptor) -> Sequence[type[AttentionBackend]]:  # type: ignore[empty-body]
    """Attention backends for the device, of its platform or of an add-on. Called in workers."""


@hookspec
def op_implementations(device: DeviceDescriptor) -> Sequence[OpImpl]:  # type: ignore[empty-body]
    """Implementations of declared ops for the device. Called in workers."""


@hookspec
def linear_kernels(device: DeviceDescriptor) -> Sequence[type[LinearKernel]]:  # type: ignore[empty-body]
    """Kernels that multiply by a weight on the device. Called in workers."""


@hookspec
def quantized_linear_kernels(device: DeviceDescriptor) -> Sequence[type[QuantizedLinearKernel]]:  # type: ignore[empty-body]
    """Kernels that multiply by a quantized weight on the device. Called in workers."""


@hookspec
def quantized_experts_kernels(device: DeviceDescriptor) -> Sequence[type[QuantizedExpertsKernel]]:  # type: ignore[empty-body]
    """Kernels that multiply by the quantized experts of a mixture on the device. Called in workers."""


@hookspec
def quant_formats() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Formats of quantized checkpoints by ``quant_method``, each as ``"module:Class"`` of a `QuantFormat`
    (`inferplane.api.quant`). ``--quantization`` takes the names as well, for checkpoints that are plain."""


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
def kv_cache_specs() -> Mapping[type[KVCacheSpec], type[GroupManager]]:  # type: ignore[empty-body]
    """Kinds of KV cache that the plugin's models declare, each with the class that manages its blocks.

    A manager also serves the specs that derive from its own, unless one of them has a nearer one. Called where the
    scheduler lives.
    """


@hookspec
def kv_cache_listeners() -> Sequence[str]:  # type: ignore[empty-body]
    """Classes that are told what enters and leaves the prefix cache, each as ``"module:Class"`` of a `KVCacheListener`
    (`inferplane.api.kv_events`), which is made with the configuration. Used where the scheduler lives."""


@hookspec
def executors() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Ways to run the ranks of a model by name, each as ``"module:Class"`` of an `Executor`
    (`inferplane.api.executor`), which is made with ``(config, progress)``. ``--executor`` names one."""


@hookspec
def model_sources() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Places that models are fetched from, by the scheme that MODEL begins with (``"s3"`` of ``s3://bucket/model``),
    each as ``"module:function"`` of a `ModelFetcher` (`inferplane.api.loading`)."""


@hookspec
def weight_loaders() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Ways to read a model's weights by the name that ``--load-format`` takes, each as ``"module:function"`` of a
    `WeightLoader` (`inferplane.api.loading`). Configuration and tokenizer still come from MODEL's folder."""


@hookspec
def engine_options() -> Sequence[OptionSpec]:  # type: ignore[empty-body]
    """Settings of the plugin's own, for the command line and for `LLM`."""


@hookspec
def validate_config(config: EngineConfig, device: DeviceDescriptor) -> None:
    """Raises `ConfigError` (`inferplane.api.config`) for a configuration that the plugin cannot serve.

    Called before weights are loaded, after the platform's own check. Any other exception counts as the plugin's fault.
    """


@hookspec
def stat_loggers() -> Sequence[str]:  # type: ignore[empty-body]
    """Classes that want the engine's figures now and then, each as ``"module:Class"`` of a `StatLogger`
    (`inferplane.api.stats`), which is made with the configuration. Used where an engine serves (not by `LLM`)."""


@hookspec
def endpoints() -> Sequence[str]:  # type: ignore[empty-body]
    """Routes for ``inferplane serve``, each as ``"module:function"`` that takes the `Engine`
    (`inferplane.api.engine`) and returns a ``fastapi.APIRouter``. They are guarded by the API keys like any other, and
    must not take a path that the server has."""


@hookspec
def diagnose() -> Sequence[Diagnostic]:  # type: ignore[empty-body]
    """What ``inferplane plugins doctor`` should know: driver, libraries, permissions, memory, each with its mend.

    Called in a process of its own that is ended when it takes too long; it may touch the device.
    """


@hookspec
def cli_commands() -> Sequence[CommandSpec]:  # type: ignore[empty-body]
    """Sub-commands of ``inferplane``."""


@hookspec
def collect_env() -> Mapping[str, str]:  # type: ignore[empty-body]
    """Facts for ``inferplane collect-env``: versions, drivers, libraries. No secrets."""
