"""Finding plugins by entry point and registering those that keep the contract, each apart from the others."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pluggy

from inferplane.api import hookspecs
from inferplane.api.manifest import API_VERSION, PluginManifest
from inferplane.plugins.negotiation import (
    declared_in_source,
    format_version,
    manifest_fault,
    needs_adapter,
    version_fault,
)
from inferplane.plugins.record import PluginRecord, PluginStatus, describe, format_traceback

ENTRY_POINT_GROUP = "inferplane.plugins"
REFERENCE = EntryPoint("reference", "inferplane.reference.plugin", ENTRY_POINT_GROUP)
"""The core's own platform, loaded like any other but without a look-up."""

logger = logging.getLogger("inferplane.plugins")


def new_manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def discover(
    manager: pluggy.PluginManager, quiet: bool = False, only: Collection[str] | None = None
) -> tuple[dict[str, PluginRecord], list[PluginRecord]]:
    """Loads every plugin that is installed, the core's own first, and registers the sound ones under their names.

    Returns the records by name, and those refused because their name was taken. A plugin that fails or is refused
    is one warning, unless ``quiet``. ``only`` leaves out, unimported, every plugin that is not named in it.
    """
    entries = (each for each in entry_points(group=ENTRY_POINT_GROUP) if only is None or each.name in only)
    found = [(entry, _blank_record(entry)) for entry in (REFERENCE, *entries)]
    found[1:] = sorted(found[1:], key=lambda pair: (pair[1].name, pair[1].distribution))
    records: dict[str, PluginRecord] = {}
    twins: list[PluginRecord] = []
    trial = _Trial()
    for entry, record in found:
        if entry.name in records:
            record = _refused(record, _twin_fault(records[entry.name]))
            twins.append(record)
        else:
            record = records[entry.name] = _load(entry, record, manager, trial)
        if not (quiet or record.is_usable):
            warn(record)
    return records, twins


def installed_names() -> list[str]:
    """Of every plugin, without importing any; the core's own first."""
    return list(dict.fromkeys([REFERENCE.name, *sorted(entry_points(group=ENTRY_POINT_GROUP).names)]))


def warn(record: PluginRecord) -> None:
    trace = f"\n{record.traceback.rstrip()}" if record.traceback else ""
    logger.warning("%s %s and is not used: %s%s", record.label, record.status_text, record.reason, trace)


def failed(record: PluginRecord, what: str, error: BaseException) -> PluginRecord:
    """``record`` after ``error`` in ``what``."""
    return replace(
        record,
        status=PluginStatus.FAILED,
        reason=f"{what}: {describe(error)}",
        traceback=format_traceback(error) if error.__traceback__ else None,
    )


class _Trial:
    """A manager on which a plugin is tried first, so that one refused half way leaves no hook behind."""

    def __init__(self) -> None:
        self._manager = new_manager()

    def fault(self, module: Any, name: str) -> tuple[str | None, tuple[str, ...]]:
        """Why the plugin's hooks are not those of the API, None when they are; and which of them will go."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                self._manager.register(module, name)
                self._manager.check_pending()
            except Exception as error:
                self._manager = new_manager()
                return f"its hooks do not fit the plugin API: {' '.join(str(error).split())}", ()
        deprecated = (each for each in caught if issubclass(each.category, DeprecationWarning))
        return None, tuple(str(each.message) for each in deprecated)


def _load(
    entry: EntryPoint, record: PluginRecord, manager: pluggy.PluginManager, trial: _Trial
) -> PluginRecord:
    try:
        module = entry.load()
    except (Exception, SystemExit) as error:
        return _import_failure(record, entry, error)
    manifest = getattr(module, "MANIFEST", None)
    if fault := manifest_fault(manifest, entry.name):
        return _refused(record, fault)
    assert isinstance(manifest, PluginManifest)
    record = replace(record, api=format_version(manifest.api), provides=tuple(manifest.provides))
    if fault := version_fault(manifest.api, record.distribution):
        return _refused(record, fault)
    fault, notes = trial.fault(module, entry.name)
    if fault:
        return _refused(record, fault)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # they are in the record's notes
        manager.register(module, entry.name)
    if needs_adapter(manifest.api):
        served, newest = format_version(manifest.api), format_version(API_VERSION)
        notes += (
            f"written for plugin API {served}, which the next major ends; this inferplane has {newest}",
        )
    return replace(record, notes=notes)


def _import_failure(record: PluginRecord, entry: EntryPoint, error: BaseException) -> PluginRecord:
    api = declared_in_source(entry.module)
    if api and (fault := version_fault(api, record.distribution)):
        record = replace(record, api=format_version(api), traceback=format_traceback(error))
        return _refused(record, fault)
    return failed(record, f"importing {entry.value}", error)


def _blank_record(entry: EntryPoint) -> PluginRecord:
    if entry.dist is None:  # only the core's own, which was not looked up
        from inferplane import __version__

        return PluginRecord(name=entry.name, distribution="inferplane", version=__version__)
    try:
        metadata = entry.dist.metadata  # parsed anew at each access
        distribution, version = metadata["Name"] or "unknown", metadata["Version"] or "unknown"
    except Exception:  # a damaged installation is told by what happens when it is loaded
        distribution = version = "unknown"
    return PluginRecord(name=entry.name, distribution=distribution, version=version)


def _refused(record: PluginRecord, reason: str) -> PluginRecord:
    return replace(record, status=PluginStatus.REFUSED, reason=reason)


def _twin_fault(first: PluginRecord) -> str:
    return f"its name is taken by {first.distribution} {first.version}; uninstall one of the two"
