"""What is under test: one device, the plugin that serves it, and the plugin's source."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferplane.api import DeviceDescriptor, DeviceRuntime, Platform
from inferplane.config import ConfigError, DeviceConfig, EngineArgs, EngineConfig, ModelConfig, ParallelConfig
from inferplane.plugins import ENTRY_POINT_GROUP, PluginRecord, PluginSet, PluginStatus, load_plugins

if TYPE_CHECKING:
    import torch

MODEL = ModelConfig(
    model="conformance",
    path="",
    hf_config={"hidden_size": 64, "intermediate_size": 160, "vocab_size": 320},
    architecture="LlamaForCausalLM",
    dtype="float32",
    max_model_len=256,
    vocab_size=320,
)
"""Of a configuration for tests that load no model."""


class Subject:
    """Made from what ``--device`` says. Raises `PluginError` for a platform that is not installed or not sound.

    A sound platform whose device is not on this machine is a subject too, for the tests that need none.
    """

    def __init__(self, requested: str) -> None:
        self.plugins: PluginSet = load_plugins()
        self.absence: str | None = None
        """Why there is no device, in the platform's own words; None when there is one."""
        name = requested.partition(":")[0]
        self.plugins.probe()
        record = next((each for each in self.plugins.records if each.name == name), None)
        if record is not None and record.status is PluginStatus.UNAVAILABLE:
            self.absence = record.reason
            self.device = DeviceDescriptor(name, index=0, name="not on this machine", total_memory_bytes=0)
        else:
            self.device = self.plugins.select_device(requested)
        self.platform: Platform = self.plugins.platform(self.device)

    @property
    def name(self) -> str:
        """What ``--device`` takes."""
        return f"{self.device.platform}:{self.device.index}"

    @property
    def record(self) -> PluginRecord:
        return next(each for each in self.plugins.records if each.name == self.device.platform)

    def has(self, capability: str) -> bool:
        return self.device.capabilities.has(capability)

    @cached_property
    def num_devices(self) -> int:
        """Of the platform, from the selected one on."""
        found = [each.devices for each in self.plugins.probe() if each.platform == self.device.platform]
        return len([each for devices in found for each in devices if each.index >= self.device.index])

    @cached_property
    def pair_fault(self) -> str | None:
        """Why a model cannot be split over two ranks here; None on two devices, and on one that ranks share."""
        if self.num_devices < 2 and not self.platform.ranks_share_device:
            return "the platform has one device"
        config = replace(self.config("float32"), parallel=ParallelConfig(tensor_parallel_size=2))
        return self._refusal(config)

    @cached_property
    def runtime(self) -> DeviceRuntime:
        """Set up as rank 0 of one."""
        runtime = self.platform.device_runtime(self.device)
        runtime.set_up(self.config("float32"), rank=0)
        return runtime

    def config(self, dtype: str) -> EngineConfig:
        """A configuration for this device without a model behind it."""
        device = DeviceConfig(platform=self.device.platform, index=self.device.index)
        return EngineConfig(model=replace(MODEL, dtype=dtype), device=device)

    def defaults(self, checkpoint_dtype: str) -> Mapping[str, Any]:
        """What the platform chooses when the user leaves everything open."""
        return self.platform.config_defaults(EngineArgs(), self.device, checkpoint_dtype)

    def dtype_fault(self, dtype: torch.dtype) -> str | None:
        """Why the platform refuses to run models of this type, in its own words; None when it does not."""
        return self._refusal(self.config(str(dtype).removeprefix("torch.")))

    def _refusal(self, config: EngineConfig) -> str | None:
        try:
            self.platform.validate_config(config, self.device)
        except ConfigError as error:
            return str(error)
        return None

    # -- the plugin's own package

    @cached_property
    def entry_point(self) -> EntryPoint | None:
        """None for the core's own reference platform, which needs none."""
        return next(iter(entry_points(group=ENTRY_POINT_GROUP, name=self.device.platform)), None)

    @property
    def distribution(self) -> Distribution | None:
        return self.entry_point.dist if self.entry_point else None

    @cached_property
    def package(self) -> Path | None:
        """The folder of the package that holds the plugin's module."""
        if self.entry_point is None:
            return None
        top = self.entry_point.module.partition(".")[0]
        spec = find_spec(top)
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations)))

    @cached_property
    def source_files(self) -> list[Path]:
        """Every Python file of the plugin's package."""
        return sorted(self.package.rglob("*.py")) if self.package else []

    @cached_property
    def first_token_files(self) -> list[Path]:
        """Those of them without which no token is served; see `inferplane_conformance.source.first_token`."""
        if self.package is None:
            return []
        command = [sys.executable, "-m", "inferplane_conformance.source.first_token", self.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
        if done.returncode != 0:
            raise RuntimeError(
                f"the platform could not be loaded in a process of its own:\n{done.stderr[-3000:]}"
            )
        return [Path(file) for file in json.loads(done.stdout.strip().splitlines()[-1])]
