"""The surface that plugins import, and the only one. Importing it does not import torch;
`inferplane.api.ops`, `inferplane.api.model` do, and belong inside a plugin's hooks.
"""

from inferplane.api.comm import Communicator, ProcessGroup, SoloCommunicator
from inferplane.api.device import (
    CapabilitySet,
    DeviceDescriptor,
    DeviceRuntime,
    Event,
    Graph,
    GraphBackend,
    HostCopy,
    MemoryInfo,
    Supported,
    Unsupported,
)
from inferplane.api.diagnosis import Diagnostic, Health
from inferplane.api.hookspecs import CommandSpec, OptionSpec, hookimpl
from inferplane.api.manifest import API_VERSION, PluginManifest
from inferplane.api.platform import Platform

__all__ = [
    "API_VERSION",
    "CapabilitySet",
    "CommandSpec",
    "Communicator",
    "DeviceDescriptor",
    "DeviceRuntime",
    "Diagnostic",
    "Health",
    "Event",
    "Graph",
    "GraphBackend",
    "HostCopy",
    "MemoryInfo",
    "OptionSpec",
    "Platform",
    "PluginManifest",
    "ProcessGroup",
    "SoloCommunicator",
    "Supported",
    "Unsupported",
    "hookimpl",
]
