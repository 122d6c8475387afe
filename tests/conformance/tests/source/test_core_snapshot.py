"""Every way to change a module of the core is a change, and using it is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import inferplane.api.ops
import inferplane.scheduler.queue
from inferplane_conformance.source.core_snapshot import changed, snapshot

MODULE = inferplane.scheduler.queue


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda patch: patch.setattr(MODULE, "added", 1, raising=False), "inferplane.scheduler.queue.added"),
        (lambda patch: patch.setattr(MODULE, "annotations", 1), "inferplane.scheduler.queue.annotations"),
        (
            lambda patch: patch.setattr(inferplane.api.ops.OpTable, "__init__", print),
            "inferplane.api.ops.OpTable.__init__",
        ),
        (
            lambda patch: patch.setitem(inferplane.api.ops.OPS, "rms_norm", None),
            "inferplane.api.ops.OPS['rms_norm']",
        ),
        (lambda patch: patch.delattr(MODULE, "annotations"), "inferplane.scheduler.queue.annotations"),
    ],
)
def test_a_change_is_seen(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None], path: str
):
    before = snapshot()
    change(monkeypatch)
    assert path in changed(before, snapshot())
    monkeypatch.undo()
    assert changed(before, snapshot()) == []


def test_a_module_that_is_loaded_late_is_no_change():
    before = {"inferplane.a.x": 1}
    assert changed(before, {"inferplane.a.x": 1, "inferplane.b.y": 2}) == []
