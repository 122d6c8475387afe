"""Where the limits of the control groups that hold this process are written, for whichever version is mounted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, root: Path = Path("/")) -> list[Path]:
    """Folders whose limits bind this process for ``controller`` (``memory``, ``cpu``), its own first.

    A limit of any of them holds. Empty where there are no control groups.
    """
    try:
        membership = (root / "proc/self/cgroup").read_text()
    except OSError:
        return []
    folders: list[Path] = []
    for line in membership.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "" and hierarchy == "0":
            mount = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / controller
        else:
            continue
        folders.extend(_upwards(mount, path))
    return folders


def read_figure(file: Path) -> int | None:
    """The number in a control file; None where it says ``max`` or there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _upwards(mount: Path, path: str) -> Iterator[Path]:
    """From the process's group up to the mount. A container may be told the host's path: then only the mount exists."""
    folder = mount / path.strip("/")
    while folder != mount:
        if folder.is_dir():
            yield folder
        folder = folder.parent
    yield mount
