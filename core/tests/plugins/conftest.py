from __future__ import annotations

from pathlib import Path

import pytest

from toy_plugins import ToyIndex


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyIndex:
    """An empty place to install toy distributions into. What is really installed stays visible beside them."""
    monkeypatch.delenv("INFERPLANE_DEVICE", raising=False)
    monkeypatch.delenv("INFERPLANE_PLUGINS", raising=False)
    return ToyIndex(tmp_path, monkeypatch)
