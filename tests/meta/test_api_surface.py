"""The plugin API changes only together with its version and its snapshot, and never in what is released."""

from __future__ import annotations

from pathlib import Path

import pytest

import api_surface
from api_surface import Surface, breaks, fault, needed_version, write

BASE = {
    "a.Backend(ABC)",
    "a.Backend.forward(self, x: Tensor) -> Tensor  [abstractmethod]",
    "a.Layer()  [dataclass(frozen=True)]",
    "a.Layer.size: int",
    "a.load(path: Path) -> None",
}


def test_the_surface_is_written_down_and_its_version_fits():
    assert (found := fault(api_surface.api_version(), set(api_surface.surface()))) is None, found


def test_the_previous_major_is_frozen():
    from inferplane.api.manifest import PREVIOUS_API_VERSION

    assert api_surface.read_snapshot(api_surface.snapshot_file(PREVIOUS_API_VERSION))[0]


def test_every_hook_is_on_the_surface():
    import reference_text

    lines = api_surface.surface()
    for name in reference_text.hook_functions():
        assert any(line.startswith(f"inferplane.api.hookspecs.{name}(") for line in lines)


@pytest.mark.parametrize(
    ("gone", "new", "version"),
    [
        ((), (), (3, 4)),
        ((), ("a.store(path: Path) -> None",), (3, 5)),
        ((), ("a.Backend.close(self) -> None",), (3, 5)),
        ((), ("a.Layer.bias: bool = …",), (3, 5)),
        ((), ("a.Other()", "a.Other.size: int"), (3, 5)),
        ((), ("a.Backend.close(self) -> None  [abstractmethod]",), (4, 0)),
        ((), ("a.Layer.bias: bool",), (4, 0)),
        (("a.load(path: Path) -> None",), (), (4, 0)),
        (("a.load(path: Path) -> None",), ("a.load(path: str) -> None",), (4, 0)),
        (("a.Layer.size: int",), ("a.Layer.size: float",), (4, 0)),
    ],
)
def test_what_a_change_costs(gone: tuple[str, ...], new: tuple[str, ...], version: tuple[int, int]):
    changed = (BASE - set(gone)) | set(new)
    assert needed_version((3, 4), BASE, changed) == version
    assert bool(breaks(BASE, changed)) == (version == (4, 0))


def test_a_released_version_stays_as_it_is(tmp_path: Path):
    write((3, 4), sorted(BASE), True, tmp_path)
    assert fault((3, 4), BASE, tmp_path) is None
    added = BASE | {"a.store(path: Path) -> None"}
    message = fault((3, 4), added, tmp_path) or ""
    assert "make API_VERSION (3, 5)" in message and "+ a.store" in message and api_surface.COMMAND in message
    with pytest.raises(SystemExit, match=r"make API_VERSION \(3, 5\)"):
        write((3, 4), sorted(added), False, tmp_path)
    smaller = BASE - {"a.Layer.size: int"}
    assert "make API_VERSION (4, 0)" in (fault((3, 5), smaller, tmp_path) or "")
    assert "there is no snapshot of API 4.0; write it with" in (fault((4, 0), smaller, tmp_path) or "")
    write((4, 0), sorted(smaller), False, tmp_path)
    assert fault((4, 0), smaller, tmp_path) is None


def test_an_open_version_is_written_down_again(tmp_path: Path):
    write((3, 4), sorted(BASE), False, tmp_path)
    message = fault((3, 4), BASE - {"a.Layer.size: int"}, tmp_path) or ""
    assert "the plugin API changed" in message and "- a.Layer.size: int" in message
    write((3, 4), sorted(BASE - {"a.Layer.size: int"}), False, tmp_path)
    assert fault((3, 4), BASE - {"a.Layer.size: int"}, tmp_path) is None


def test_reading_a_source(tmp_path: Path):
    package = tmp_path / "inferplane/api"
    package.mkdir(parents=True)
    (tmp_path / "inferplane/inner.py").write_text("class Inner:\n    size: int = 3\n    _hidden: int\n")
    (package / "thing.py").write_text(
        "from inferplane.inner import Inner\nfrom json import dumps\n"
        "__all__ = ['Inner', 'dumps', 'make', 'LIMIT']\n"
        "LIMIT = 5\n_secret = 1\n"
        "def make(name: str, *rest: int, size: int = LIMIT, kind=None) -> Inner: ...\n"
        "def hidden(): ...\n"
    )
    found = Surface(tmp_path)
    found.add_module("inferplane.api.thing")
    assert found.lines == {
        "inferplane.api.thing.Inner = inferplane.inner.Inner",
        "inferplane.api.thing.dumps = json.dumps",
        "inferplane.inner.Inner()",
        "inferplane.inner.Inner.size: int = …",
        "inferplane.api.thing.LIMIT is a value",
        "inferplane.api.thing.make(name: str, *rest: int, size: int=…, kind=…) -> Inner",
    }
