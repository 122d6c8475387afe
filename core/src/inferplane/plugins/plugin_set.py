"""`PluginSet`: the plugins of this process, and every question that the engine asks them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inferplane.api.device import DeviceDescriptor, Supported, Unsupported
from inferplane.api.hookspecs import CommandSpec, OptionSpec
from inferplane.api.platform import Platform
from inferplane.config import ConfigError
from inferplane.config.environment import environment
from inferplane.plugins import selection
from inferplane.plugins.answers import checked_answer
from inferplane.plugins.discovery import REFERENCE, discover, failed, new_manager, warn
from inferplane.plugins.probing import PROBE_TIMEOUT_S, Answer, probe_all
from inferplane.plugins.record import PluginError, PluginRecord, PluginStatus
from inferplane.plugins.target import import_target

if TYPE_CHECKING:
    import torch

    from inferplane.api.attention import AttentionBackend, AttentionQuery
    from inferplane.api.diagnosis import Diagnostic
    from inferplane.api.kv import KVCacheSpec
    from inferplane.api.kv_manager import GroupManager
    from inferplane.api.linear import LinearKernel, LinearShape
    from inferplane.api.loading import WeightLoader
    from inferplane.api.ops import OpTable
    from inferplane.api.quant import QuantizedLinearKernel
    from inferplane.api.quantized_experts import ExpertsShape, QuantizedExpertsKernel
    from inferplane.api.worker import Worker
    from inferplane.config import EngineConfig
    from inferplane.plugins.decision import Decision

logger = logging.getLogger("inferplane.plugins")


def load_plugins(named: Sequence[str] = (), *, quiet: bool = False) -> PluginSet:
    """Loads the installed plugins. Milliseconds, and no torch unless a plugin breaks its word.

    Plugins in ``named`` and in ``INFERPLANE_PLUGINS`` must load: one that is missing, refused or failing raises
    `PluginError` with its cause. Any other's failure is one warning and a record; ``quiet`` leaves the warning out
    (for processes whose parent has said it).
    """
    plugins = PluginSet(quiet=quiet)
    for name in named:
        plugins.require(name, "the caller")
    from_environment = environment("INFERPLANE_PLUGINS") or ""
    for name in filter(None, map(str.strip, from_environment.split(","))):
        plugins.require(name, "INFERPLANE_PLUGINS")
    return plugins


class PluginSet:
    """Made by `load_plugins`. A hook runs when its question is first asked, and its answer is kept."""

    def __init__(
        self,
        *,
        quiet: bool = False,
        probe_timeout_s: float = PROBE_TIMEOUT_S,
        only: Collection[str] | None = None,
    ) -> None:
        self._manager = new_manager()
        self._quiet = quiet
        self._probe_timeout_s = probe_timeout_s
        self._records, self._twins = discover(self._manager, quiet, only)
        self._supported: dict[str, Supported] = {}
        self._answers: dict[tuple[str, DeviceDescriptor | None], list[tuple[str, Any]]] = {}
        self._merged_answers: dict[str, dict[Any, Any]] = {}
        self._platforms: dict[DeviceDescriptor, Platform] = {}

    # -- what is installed

    @property
    def records(self) -> list[PluginRecord]:
        """One for each plugin found, in the state that it is in now; `probe` first to have the devices in them."""
        return [*self._records.values(), *self._twins]

    def require(self, name: str, source: str) -> PluginRecord:
        """The record of a plugin that loaded. Raises `PluginError`, naming ``source`` as who asked, when it did not."""
        record = self._records.get(name)
        if record is None:
            installed = selection.listing(self.records)
            raise PluginError(
                f"{source} names plugin {name!r}, which is not installed. Installed:\n{installed}"
            )
        if not record.is_usable:
            # a warning has shown the traceback, unless this set is quiet
            trace = f"\n{record.traceback}" if record.traceback and self._quiet else ""
            raise PluginError(
                f"{source} names {record.label}, which {record.status_text}: {record.reason}{trace}"
            )
        return record

    # -- devices

    def probe(self) -> list[Supported]:
        """Asks every platform that was not asked yet for its devices; returns those that have some."""
        self._probe(self._records)
        return list(self._supported.values())

    def select_device(self, requested: str | None = None) -> DeviceDescriptor:
        """The device to run on: ``requested`` (``NAME`` or ``NAME:INDEX``), else ``INFERPLANE_DEVICE``, else the best.

        Raises `PluginError`: for an unknown name with all that is installed, for a platform that cannot serve with
        its cause, for a tie with both names.
        """
        source = "--device" if requested else selection.DEVICE_VARIABLE
        wanted = requested or environment(selection.DEVICE_VARIABLE)
        if not wanted:
            if not (supported := self.probe()):
                raise selection.no_device(self.records)
            return selection.pick_device(selection.pick_best(supported), None)
        name, index = selection.parse_device(wanted)
        self._probe([name])
        if answer := self._supported.get(name):
            return selection.pick_device(answer, index)
        record = self._records.get(name)
        if record is None or record.status is PluginStatus.LOADED:  # loaded after probing: it is no platform
            self.probe()
            raise selection.unknown_device(name, source, self.records)
        raise selection.unusable_device(record, source, with_traceback=self._quiet)

    def devices_from(self, device: DeviceDescriptor) -> list[DeviceDescriptor]:
        """A device that was selected, and those of its platform that come after it."""
        return [each for each in self._supported[device.platform].devices if each.index >= device.index]

    def platform(self, device: DeviceDescriptor) -> Platform:
        """The platform object for a device, made once. Raises `PluginError` when its plugin makes none."""
        if device not in self._platforms:
            record = self._records.get(device.platform)
            if record is None:
                raise selection.unknown_device(device.platform, "the configuration", self.records)
            if not self._implements(device.platform, "create_platform"):
                raise PluginError(
                    f"{record.label} has no hook create_platform, which makes the platform of the devices that its "
                    "probe_devices found; one that is written is marked @hookimpl"
                )
            platform = self._call(device.platform, "create_platform", device=device)
            if not isinstance(platform, Platform):
                raise PluginError(
                    f"{record.label} made {platform!r} for its device, not an inferplane.api.Platform"
                )
            self._platforms[device] = platform
        return self._platforms[device]

    def worker_class(self, device: DeviceDescriptor) -> type[Worker]:
        """Of the device's platform, for this core's API."""
        worker = self.platform(device).worker_class()
        if not self._records[device.platform].is_adapted:
            return worker
        from inferplane.plugins import previous_api

        return previous_api.adapt_worker(worker)

    def _probe(self, names: Iterable[str]) -> None:
        probes = {
            name: functools.partial(self._call, name, "probe_devices")
            for name in names
            if self._implements(name, "probe_devices") and self._records[name].status is PluginStatus.LOADED
        }
        for name, answer in probe_all(probes, self._probe_timeout_s).items():
            self._note_answer(name, answer)

    def _note_answer(self, name: str, answer: Answer) -> None:
        record = self._records[name]
        if isinstance(answer, Supported):
            self._supported[name] = answer
            found = selection.found_text(answer)
            record = replace(record, status=PluginStatus.AVAILABLE, score=answer.score, reason=found)
        elif isinstance(answer, Unsupported):
            record = replace(record, status=PluginStatus.UNAVAILABLE, reason=answer.reason)
        else:
            record = failed(record, "probing for devices", answer)
            if not self._quiet:
                warn(record)
        self._records[name] = record

    # -- what runs on a device; these import torch

    def op_decisions(self, device: DeviceDescriptor, dtype: torch.dtype) -> list[Decision]:
        """For each declared op who won and why the others did not, the reference body among them."""
        from inferplane.plugins import resolution

        return resolution.decide_ops(self.collect("op_implementations", device), device, dtype)

    def resolve_ops(self, device: DeviceDescriptor, dtype: torch.dtype) -> OpTable:
        """Every declared op once and for all. An op that nobody provides runs on its reference."""
        from inferplane.plugins import resolution

        return resolution.make_op_table(self.op_decisions(device, dtype))

    def linear_kernels(self, device: DeviceDescriptor) -> list[type[LinearKernel]]:
        return [kernel for _, kernels in self.collect("linear_kernels", device) for kernel in kernels]

    def linear_decision(self, shape: LinearShape, device: DeviceDescriptor) -> Decision:
        from inferplane.plugins import resolution

        return resolution.decide_linear(self.collect("linear_kernels", device), shape, device)

    def choose_linear(self, shape: LinearShape, device: DeviceDescriptor) -> type[LinearKernel]:
        """The kernel for one weight. Raises `PluginError` with every kernel's reason when none supports it."""
        return self.linear_decision(shape, device).chosen.implementation

    def quantized_decision(
        self, shape: LinearShape, device: DeviceDescriptor, *, dequantizes: bool = False
    ) -> Decision:
        from inferplane.plugins import resolution

        offers = self.collect("quantized_linear_kernels", device)
        return resolution.decide_quantized(offers, shape, device, dequantizes=dequantizes)

    def choose_quantized(
        self, shape: LinearShape, device: DeviceDescriptor
    ) -> type[QuantizedLinearKernel] | None:
        """The kernel for one quantized weight; None where it is to be dequantized."""
        return self.quantized_decision(shape, device).chosen.implementation

    def experts_decision(
        self, shape: ExpertsShape, device: DeviceDescriptor, *, dequantizes: bool = False
    ) -> Decision:
        from inferplane.plugins import resolution

        offers = self.collect("quantized_experts_kernels", device)
        return resolution.decide_experts(offers, shape, device, dequantizes=dequantizes)

    def choose_experts(
        self, shape: ExpertsShape, device: DeviceDescriptor
    ) -> type[QuantizedExpertsKernel] | None:
        """The kernel for a layer's quantized experts; None where they are to be dequantized."""
        return self.experts_decision(shape, device).chosen.implementation

    def attention_backends(self, device: DeviceDescriptor) -> list[type[AttentionBackend]]:
        return [backend for _, backends in self.collect("attention_backends", device) for backend in backends]

    def attention_decision(self, query: AttentionQuery, name: str | None = None) -> Decision:
        from inferplane.plugins import resolution

        return resolution.decide_attention(self.collect("attention_backends", query.device), query, name)

    def choose_attention(self, query: AttentionQuery, name: str | None = None) -> type[AttentionBackend]:
        """The backend for one layer: the one called ``name`` when given, else the best that supports it.

        Raises `PluginError` when the named one is unknown or no backend supports the layer, with the reasons.
        """
        return self.attention_decision(query, name).chosen.implementation

    # -- what plugins contribute by name

    def models(self) -> dict[str, str]:
        """``"module:Class"`` by Hugging Face architecture name."""
        return self._merged("models")

    def quant_formats(self) -> dict[str, str]:
        """``"module:Class"`` by ``quant_method``."""
        return self._merged("quant_formats")

    def scheduler_policies(self) -> dict[str, str]:
        return self._merged("scheduler_policies")

    def logits_processors(self) -> dict[str, str]:
        return self._merged("logits_processors")

    def kv_cache_specs(self) -> dict[type[KVCacheSpec], type[GroupManager]]:
        """Managers by the class of spec that they are for."""
        return self._merged("kv_cache_specs")

    def kv_cache_listeners(self) -> list[str]:
        return [target for _, targets in self.collect("kv_cache_listeners") for target in targets]

    def executors(self) -> dict[str, str]:
        return self._merged("executors")

    def model_sources(self) -> dict[str, str]:
        """``"module:function"`` by URI scheme."""
        return self._merged("model_sources")

    def weight_loaders(self) -> dict[str, str]:
        """``"module:function"`` by load format."""
        return self._merged("weight_loaders")

    def weight_loader(self, load_format: str) -> WeightLoader:
        """Raises `PluginError` when it cannot be imported."""
        return import_target(self.weight_loaders()[load_format], f"the loader of load format {load_format!r}")

    def stat_loggers(self) -> list[str]:
        return [target for _, targets in self.collect("stat_loggers") for target in targets]

    def endpoints(self) -> list[str]:
        return [target for _, targets in self.collect("endpoints") for target in targets]

    def engine_options(self) -> dict[str, OptionSpec]:
        """Settings of plugins by name."""
        return self._merged("engine_options")

    def diagnose(self) -> list[tuple[str, Sequence[Diagnostic]]]:
        """What each plugin says of its own health. May take long: run it where it can be ended."""
        return self.collect("diagnose")

    def validate_config(self, config: EngineConfig, device: DeviceDescriptor) -> None:
        """Raises `ConfigError` when a plugin cannot serve the configuration."""
        for name in self._implementers("validate_config"):
            if not self._may_serve(name, device):
                continue
            try:
                self._call(name, "validate_config", config=config, device=device)
            except ConfigError:
                raise
            except (Exception, SystemExit) as error:
                self._blame(name, "validate_config", error, device)

    def commands(self) -> list[CommandSpec]:
        """Sub-commands by name; where two plugins bring one of the same name, the first plugin's."""
        return list(self._merged("cli_commands").values())

    def collect_env(self) -> dict[str, dict[str, str]]:
        """Facts of each plugin that has some."""
        return dict(self.collect("collect_env"))

    # -- calling hooks

    def collect(self, hook: str, device: DeviceDescriptor | None = None) -> list[tuple[str, Any]]:
        """(plugin, a list or dict of what its hook returned) for each plugin that implements ``hook`` and may serve
        ``device``.

        A plugin that raises is left out, with a warning; the selected device's own platform must not, and raises
        `PluginError`.
        """
        key = (hook, device)
        if key not in self._answers:
            arguments = {} if device is None else {"device": device}
            asked = (name for name in self._implementers(hook) if self._may_serve(name, device))
            answers = ((name, self._ask(name, hook, device, arguments)) for name in asked)
            self._answers[key] = [(name, answer) for name, answer in answers if answer is not None]
        return self._answers[key]

    def _ask(
        self, name: str, hook: str, device: DeviceDescriptor | None, arguments: Mapping[str, Any]
    ) -> Any:
        try:
            answer = self._call(name, hook, **arguments)
            if answer is not None and self._records[name].is_adapted and device is not None:
                from inferplane.plugins import previous_api

                answer = previous_api.adapt(hook, answer)
            return answer if answer is None else checked_answer(name, hook, answer)
        except (Exception, SystemExit) as error:
            self._blame(name, hook, error, device)
            return None

    def _blame(self, name: str, hook: str, error: BaseException, device: DeviceDescriptor | None) -> None:
        """Notes that a hook raised. Raises `PluginError` when its plugin serves the selected device."""
        record = self._records[name] = failed(self._records[name], f"its hook {hook}", error)
        if device is not None and device.platform == name:
            raise PluginError(
                f"{record.label}, which serves the selected device, failed: {record.reason}"
            ) from error
        if not self._quiet:
            warn(record)

    def _may_serve(self, name: str, device: DeviceDescriptor | None) -> bool:
        """Whether a hook about ``device`` is the plugin's business: a platform is asked about its own devices only,
        what brings no platform about all, and so is the reference, on which everything falls back."""
        if device is None or name in (device.platform, REFERENCE.name):
            return True
        return not self._implements(name, "probe_devices")

    def _implementers(self, hook: str) -> list[str]:
        return [name for name in self._records if self._implements(name, hook)]

    def _implements(self, name: str, hook: str) -> bool:
        return any(impl.plugin_name == name for impl in getattr(self._manager.hook, hook).get_hookimpls())

    def _call(self, name: str, hook: str, **arguments: Any) -> Any:
        """One plugin's implementation of a hook; None when it has none."""
        others = [plugin for other, plugin in self._manager.list_name_plugin() if other != name]
        result = self._manager.subset_hook_caller(hook, others)(**arguments)
        if isinstance(result, list):  # pluggy's list over implementations, of which there is at most one here
            return result[0] if result else None
        return result

    def _merged(self, hook: str) -> dict[Any, Any]:
        if hook in self._merged_answers:
            return self._merged_answers[hook]
        merged: dict[Any, Any] = {}
        owners: dict[Any, str] = {}
        for plugin, mapping in self.collect(hook):
            for key, value in mapping.items():
                if key in merged and not self._quiet:
                    first, second = self._records[owners[key]].label, self._records[plugin].label
                    logger.warning("%s: %s and %s both bring %r; the first is used", hook, first, second, key)
                merged.setdefault(key, value)
                owners.setdefault(key, plugin)
        self._merged_answers[hook] = merged
        return merged
