"""The plugin manager: find plugins, keep their failures apart, choose a device, resolve what runs on it.

Importing this package does not import torch; `PluginSet.resolve_ops` and its neighbours do, and belong in workers.
"""

from inferplane.plugins.decision import Candidate, Decision
from inferplane.plugins.discovery import ENTRY_POINT_GROUP
from inferplane.plugins.plugin_set import PluginSet, load_plugins
from inferplane.plugins.record import PluginError, PluginRecord, PluginStatus
from inferplane.plugins.selection import DEVICE_VARIABLE

__all__ = [
    "DEVICE_VARIABLE",
    "ENTRY_POINT_GROUP",
    "Candidate",
    "Decision",
    "PluginError",
    "PluginRecord",
    "PluginSet",
    "PluginStatus",
    "load_plugins",
]
